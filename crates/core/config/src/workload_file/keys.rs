//! The keys of the workload file, table by table, for its documentation: `docs/workload.md` has a row for each.

use super::WorkloadKeys;
use super::arrival::ArrivalKeys;
use super::class::{ClassKeys, ListedClassKeys, PrefixKeys, SessionKeys};
use super::dist::DistKeys;
use super::trace::TraceKeys;
use crate::doc::Row;

/// Every key, in the order of the documentation. Those of a class are at the top level, and again in `[[class]]`.
pub fn rows() -> Vec<Row> {
    let tables = [
        WorkloadKeys::rows(),
        ClassKeys::rows(),
        ArrivalKeys::rows(),
        PrefixKeys::rows(),
        SessionKeys::rows(),
        ListedClassKeys::rows(),
        TraceKeys::rows(),
        DistKeys::rows(),
    ];
    tables.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use super::*;
    use crate::doc::{Doc, Row, markdown_table};
    use crate::workload_file::read;

    /// Every key that the reader reads, over all kinds, with its default if that is a constant.
    fn keys_read() -> BTreeMap<String, Option<String>> {
        let kinds = [
            "kind = \"gamma\"\nrate_per_s = 1\ncv = 1",
            "kind = \"weibull\"\nrate_per_s = 1\nshape = 1",
            "kind = \"ramp\"\nto_per_s = 1\nramp_s = 1",
            "kind = \"diurnal\"\nrate_per_s = 1",
            "kind = \"timestamps\"\nms = [1]",
        ];
        let dists = [
            "kind = \"exact\", value = 1",
            "kind = \"zipf\", min = 1, max = 2",
            "kind = \"normal\", mean = 1, cv = 1",
            "kind = \"empirical\", file = \"l.csv\"",
            "kind = \"choice\", values = [1]",
        ];
        let mut texts = vec![
            "requests = 1\nmodels = [\"a\"]\n[[prefix]]\nbranches = 1\n".to_owned(),
            "requests = 1\n[[class]]\n".to_owned(),
            "[trace]\nfile = \"t\"\n".to_owned(),
        ];
        texts.extend(kinds.map(|kind| format!("requests = 1\n[arrival]\n{kind}\n")));
        texts.extend(dists.map(|dist| format!("requests = 1\nosl = {{ {dist} }}\n")));
        let mut keys = BTreeMap::new();
        for text in texts {
            let (_, settings) = read(Doc::parse("", text.as_bytes())).expect(&text);
            for setting in &settings {
                let path = setting.path.replace("osl.", "DISTRIBUTION.");
                let path = path.replace("[0]", "");
                let own = ClassKeys::NAMES
                    .iter()
                    .any(|key| path == format!("class.{key}"));
                let path = path
                    .strip_prefix("class.")
                    .filter(|path| own || path.contains('.'))
                    .map(str::to_owned)
                    .unwrap_or(path);
                let default = setting.value.clone();
                let default = default.filter(|_| setting.origin.to_string() == "default");
                let entry = keys.entry(path).or_insert(None);
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
        let read: BTreeSet<&str> = keys.keys().map(String::as_str).collect();
        assert_eq!(declared, read);
    }

    #[test]
    fn defaults_are_read_as_they_are_declared() {
        let keys = keys_read();
        for row in rows().iter().filter(|row| row.default.is_some()) {
            assert_eq!(keys[&row.path], row.default, "{}", row.path);
        }
    }

    /// The page has a table of keys behind each of these marks.
    #[test]
    fn the_page_has_the_declared_keys() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/workload.md");
        let found = std::fs::read_to_string(&path).unwrap();
        let top: Vec<Row> = [WorkloadKeys::rows(), ClassKeys::rows()].concat();
        let mut page = found.clone();
        for (mark, rows) in [
            ("top level", top),
            ("arrival", ArrivalKeys::rows()),
            ("prefix", PrefixKeys::rows()),
            ("session", SessionKeys::rows()),
            ("class", ListedClassKeys::rows()),
            ("trace", TraceKeys::rows()),
            ("distribution", DistKeys::rows()),
        ] {
            let mark = format!("<!-- keys: {mark} -->\n");
            let begin = page.find(&mark).expect(&mark) + mark.len();
            let end = begin + page[begin..].find("<!-- end -->").expect(&mark);
            page.replace_range(begin..end, &markdown_table(&rows));
        }
        if std::env::var_os("SLIPSTREAM_WRITE_DOCS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        assert!(
            found == page,
            "docs/workload.md is stale; run SLIPSTREAM_WRITE_DOCS=1 cargo test -p slipstream-config page"
        );
    }
}
