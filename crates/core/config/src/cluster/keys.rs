//! The keys of the cluster file, table by table, for its documentation: `docs/cluster-file.md` has a row for each.

use super::autoscale::AutoscaleKeys;
use super::engine;
use super::event::EventKeys;
use super::gpu::{GpuKeys, LinkKeys};
use super::host::{HostKeys, ThreadsKeys};
use super::kv::KvKeys;
use super::live::{EventsKeys, FaultsKeys, LiveKeys, OutputKeys};
use super::model::ModelKeys;
use super::network::NetworkKeys;
use super::pool::PoolKeys;
use super::router::RouterKeys;
use super::share::ShareKeys;
use super::upstream::{EnginesKeys, UpstreamKeys};
use crate::doc::Row;

/// Every key, in the order of the documentation.
pub fn rows() -> Vec<Row> {
    let tables = [
        ModelKeys::rows(),
        engine::rows(),
        GpuKeys::rows(),
        LinkKeys::rows(),
        PoolKeys::rows(),
        EnginesKeys::rows(),
        ShareKeys::rows(),
        RouterKeys::rows(),
        NetworkKeys::rows(),
        HostKeys::rows(),
        ThreadsKeys::rows(),
        KvKeys::rows(),
        AutoscaleKeys::rows(),
        EventKeys::rows(),
        LiveKeys::rows(),
        EventsKeys::rows(),
        FaultsKeys::rows(),
        OutputKeys::rows(),
        UpstreamKeys::rows(),
    ];
    tables.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fmt::Write as _;
    use std::path::Path;

    use super::*;
    use crate::cluster::file;
    use crate::doc::{Doc, markdown_table};

    /// Every key that the parser reads, over all kinds, with its default if that is a constant.
    fn keys_read() -> BTreeMap<String, Option<String>> {
        let table = "\n[engine.timing]\nkind = \"table\"\npath = \"t.csv\"\n";
        let linear = "\n[engine.timing]\nkind = \"linear\"\nbase_ns = 1\n";
        let constant = "[engine.timing]\nkind = \"constant\"\nstep_ns = 1\n[engine.output_len]\nkind = \"constant\"\ntokens = 1";
        let mut keys = BTreeMap::new();
        let event = "[[event]]\nkind = \"slow\"\nat_s = 1\nworker = 0\nfactor = 2\n\
                     [[event]]\nkind = \"link\"\nat_s = 1\nworker = 0\nshare = 0.5\n\
                     [[event]]\nkind = \"gpu\"\nat_s = 1\nworker = 0\n\
                     [[event]]\nkind = \"kv_late\"\nat_s = 1\nworker = 0\ndelay_ms = 5\n\
                     [[event]]\nkind = \"partition\"\nat_s = 1\nworkers = [0]\n\
                     [[event]]\nkind = \"upgrade\"\nat_s = 1\n";
        let pipeline = "[engine]\npipeline_parallel_size = 2\n[engine.lora]\nmax_loras = 1\n";
        let experts = "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 8\n\
                       enable_expert_parallel = true\n";
        let packets = "[network]\nmode = \"packets\"\n[host]\nmode = \"threads\"\n";
        let hosts = "[network]\nmode = \"flows\"\nworkers_per_leaf = 1\nuplink_bits_per_s = 1e11\ngpus_per_host = 8\n\
                     [[event]]\nkind = \"uplink\"\nat_s = 1\nleaf = 0\n";
        let engines = "[pool.main]\nengines = [\"http://a:1\"]\n";
        let gpu = "[link.l]\nbytes_per_s = 1e9\n[gpu.g]\nlike = \"h100-sxm\"\nlink = \"l\"\n";
        let prefill = "[pool.main]\nengines = [\"http://a:1\"]\nrole = \"prefill\"\n[pool.d]\nengines = [\"http://b:1\"]\n";
        let tls = "[pool.main]\nengines = [\"https://a\"]\n";
        let tables = "[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\n\
                         [engine.disk_tier]\ngib = 1\nbytes_per_s = 1e9\n\
                         [engine.peer_tier]\nenabled = true\n\
                         [engine.speculation]\nnum_speculative_tokens = 1\nmethod = \"mtp\"\nacceptance = [0.5]\n";
        let encoder = "[engine.encoder]\nenabled = true\nparameters = 1e9\n";
        let share = "[pool.main]\n[pool.d]\n[pool.d.model]\nname = \"d\"\n[share.s]\npools = [\"main\", \"d\"]\n\
                     wake_bytes_per_s = 1e9\n";
        let autoscale = "[autoscale]\npolicy = \"predictive\"\n";
        let by_slo = "[autoscale]\npolicy = \"slo\"\n[live.autoscale]\nwebhook = \"http://a:1\"\n";
        for text in [
            "", table, linear, constant, event, engines, tls, gpu, autoscale, by_slo, tables,
            prefill, packets, hosts, pipeline, experts, encoder, share,
        ] {
            let doc = Doc::parse("", text.as_bytes());
            let (_, settings) = file::read(doc, |_: &Path| Ok(Vec::new())).expect(text);
            let of_other = |path: &str| path.starts_with("pool.d.");
            for setting in settings.iter().filter(|of| !of_other(&of.path)) {
                let path = setting.path.replace("pool.main.engine.", "engine.");
                let path = path.replace("pool.main.autoscale.", "autoscale.");
                let path = path
                    .replace("gpu.g.", "gpu.NAME.")
                    .replace("link.l.", "link.NAME.")
                    .replace("share.s.", "share.NAME.")
                    .replace("event[0]", "event")
                    .replace("event[1]", "event")
                    .replace("event[2]", "event")
                    .replace("event[3]", "event")
                    .replace("event[4]", "event")
                    .replace("event[5]", "event");
                let default = setting
                    .value
                    .clone()
                    .filter(|_| setting.origin.to_string() == "default");
                let entry = keys
                    .entry(path.replace("pool.main", "pool.NAME"))
                    .or_insert(None);
                *entry = entry.take().or(default);
            }
        }
        keys
    }

    #[test]
    fn every_key_is_declared_and_every_declaration_is_of_a_key() {
        let rows = rows();
        let declared: BTreeSet<&str> = rows.iter().map(|row| &*row.path).collect();
        assert_eq!(declared.len(), rows.len(), "a key twice");
        let keys = keys_read();
        let mut read: BTreeSet<&str> = keys.keys().map(String::as_str).collect();
        read.insert("pool.NAME.engine"); // tables, described separately
        read.insert("pool.NAME.model");
        assert_eq!(declared, read);
    }

    #[test]
    fn defaults_are_read_as_they_are_declared() {
        let keys = keys_read();
        for row in rows().iter().filter(|row| row.default.is_some()) {
            assert_eq!(keys[&row.path], row.default, "{}", row.path);
        }
    }

    /// The tables of `docs/cluster-file.md`.
    fn tables() -> String {
        let mut out = String::new();
        let rows = rows();
        for of_table in rows.chunk_by(|a, b| table_of(a) == table_of(b)) {
            let table = table_of(&of_table[0]);
            let keys = markdown_table(of_table);
            write!(out, "\n## `[{table}]`\n\n{keys}").unwrap();
        }
        out
    }

    fn table_of(row: &Row) -> &str {
        row.path.rsplit_once('.').map_or("", |(table, _)| table)
    }

    #[test]
    fn the_page_has_the_declared_keys() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/cluster-file.md");
        let found = std::fs::read_to_string(&path).unwrap();
        let first = found.find("\n## `[").expect("the page has tables");
        let behind = found.rfind("\n## ").expect("a section follows the tables");
        let page = [&found[..first], &*tables(), &found[behind..]].concat();
        if std::env::var_os("SLIPSTREAM_WRITE_DOCS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        assert!(
            found == page,
            "docs/cluster-file.md is stale; run SLIPSTREAM_WRITE_DOCS=1 cargo test -p slipstream-config page"
        );
    }
}
