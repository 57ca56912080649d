//! Lists of flows, CSV or JSON by the first byte: every flow that is read connects two hosts of the
//! network, and every error names its line.

use std::io::{BufRead, Cursor};
use std::path::Path;

use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Resources};

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
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
        Err(mistakes) => assert!(mistakes.to_string().contains(name), "{mistakes}"),
        Ok(config) => {
            for flow in &config.scenario.flows {
                assert!(
                    flow.src < 3 && flow.dst < 3 && flow.src != flow.dst,
                    "{flow:?}"
                );
            }
        }
    }
}
