//! Lists of flows, CSV or JSON by the first byte: every flow that is read connects two hosts of the
//! network, and every error names its line.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run flow_list`; the corpus is kept under
//! `fuzz/corpus/flow_list`.
#![no_main]

use std::io::{BufRead, Cursor};
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Resources};

fuzz_target!(|bytes: &[u8]| {
    let Some((first, list)) = bytes.split_first() else {
        return;
    };
    let name = if first & 1 == 0 {
        "flows.csv"
    } else {
        "flows.jsonl"
    };
    let toml = format!(
        "dialect = \"slipstream\"\nedges = [[0, 1], [1, 2]]\nhosts = [0, 1, 2]\n[link]\n\
         host_links = false\n[switch]\nport_rate = 1e9\n[[flow_list]]\nfile = \"{name}\"\n"
    );
    let open =
        |_: &Path| -> Result<Box<dyn BufRead>, String> { Ok(Box::new(Cursor::new(list.to_vec()))) };
    let resources = Resources {
        open: &open,
        memory_bytes_max: 64 << 20,
    };
    match config::read_with(Doc::parse("net.toml", toml.as_bytes()), &resources) {
        Err(diagnostics) => assert!(diagnostics.to_string().contains(name), "{diagnostics}"),
        Ok(config) => {
            for flow in &config.scenario.flows {
                assert!(
                    flow.src < 3 && flow.dst < 3 && flow.src != flow.dst,
                    "{flow:?}"
                );
            }
        }
    }
});
