//! Generated traffic: patterns, sizes, load.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, Cursor};
use std::path::Path;

use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Resources};
use slipstream_netsim::scenario::Flow;

use crate::common::error;

fn file(set: &str) -> String {
    format!(
        "seed = 5\nduration = 1.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = {{ k = 4, \
         hosts_per_edge = 4 }}\n[link]\npropagation_ns = 1000\n[switch]\nport_rate = 1e10\n\
         [[flow_set]]\nflow_type = \"TCP\"\n{set}"
    )
}

fn flows(set: &str) -> Vec<Flow> {
    crate::common::config(&file(set)).scenario.flows
}

#[test]
fn patterns_have_the_expected_pairs() {
    let sized = "traffic = { size = 1000 }\n";
    let pairs = |pattern: &str| -> Vec<(u32, u32)> {
        let set = format!("pairing = \"{pattern}\"\nsink = 3\n{sized}");
        flows(&set).iter().map(|f| (f.src, f.dst)).collect()
    };
    let permutation = pairs("Permutation");
    assert_eq!(permutation.len(), 32);
    let (from, to): (BTreeSet<u32>, BTreeSet<u32>) = permutation.iter().copied().unzip();
    assert_eq!((from.len(), to.len()), (32, 32));
    assert!(permutation.iter().all(|(a, b)| a != b));
    let incast = pairs("Incast");
    assert!(incast.iter().all(|&(a, b)| b == 3 && a != 3));
    assert_eq!(incast.iter().collect::<BTreeSet<_>>().len(), 31);
    let all = pairs("AllToAll");
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 32 * 31);
    assert!(all.iter().all(|(a, b)| a != b));
}

#[test]
fn the_load_is_offered_by_hosts() {
    // 40 % of 32 links of 10 Gb/s for 0.2 s: 3.2 GB. Sizes have a mean of 1.7 MB and a standard
    // deviation of 4.1 MB. With n of about 1,870 flows, the standard error of the mean is 4.1/√n
    // MB, 5.6 %.
    let set = "load = 0.4\nspan = 0.2\ntraffic = { size_dist = \"WebSearch\" }\n";
    let made = flows(set);
    let bytes: u64 = made.iter().filter_map(|f| f.demand.bytes()).sum();
    let share = bytes as f64 * 8.0 / (32.0 * 1e10 * 0.2);
    assert!((share - 0.4).abs() < 4.0 * 0.056 * 0.4, "{share}");
    // Arrivals are spread: about 187 of them per tenth of the span (six standard deviations of 14).
    let mut tenths = BTreeMap::new();
    for flow in &made {
        *tenths.entry(flow.start_ns / 20_000_000).or_insert(0i32) += 1;
    }
    assert_eq!(tenths.len(), 10);
    assert!(tenths.values().all(|n| (n - 187).abs() < 84), "{tenths:?}");
    assert_eq!(flows(set), made, "the same seed gives the same flows");
}

#[test]
fn the_load_of_an_incast_is_that_of_its_sink() {
    let set = "pairing = \"Incast\"\nload = 0.5\nspan = 0.1\ntraffic = { size = 100000 }\n";
    let bytes: u64 = flows(set).iter().filter_map(|f| f.demand.bytes()).sum();
    // 625 flows expected, ± 4 √625.
    let share = bytes as f64 * 8.0 / (1e10 * 0.1);
    assert!((share - 0.5).abs() < 0.5 * 4.0 / 25.0, "{share}");
}

#[test]
fn sizes_are_read_from_a_file_next_to_the_configuration() {
    let toml = file("flow_count = 50\ntraffic = { size_csv = \"sizes.csv\" }\n");
    let read = |content: Result<&str, &str>| {
        let doc = Doc::parse("some/where/net.toml", toml.as_bytes());
        let open = |path: &Path| -> Result<Box<dyn BufRead>, String> {
            assert_eq!(path.to_string_lossy(), "some/where/sizes.csv");
            Ok(Box::new(Cursor::new(content?.to_owned())))
        };
        let resources = Resources {
            open: &open,
            memory_bytes_max: u64::MAX,
        };
        config::read_with(doc, &resources)
    };
    let config = read(Ok("bytes,p\n500,0\n700,1\n")).unwrap();
    assert_eq!(config.scenario.flows.len(), 50);
    for flow in &config.scenario.flows {
        assert!((500..=700).contains(&flow.demand.bytes().unwrap()));
    }
    for (content, part) in [
        (Err("no such file"), "no such file"),
        (Ok("1,0.5\n"), "two points"),
    ] {
        assert!(read(content).unwrap_err().to_string().contains(part));
    }
}

#[test]
fn invalid_sets_are_refused() {
    for (set, part) in [
        ("traffic = { size = 1000 }\n", "flow_count"),
        (
            "span = 1.0\nflow_count = 3\ntraffic = { size = 1000 }\n",
            "`load`",
        ),
        (
            "flow_count = 3\ntraffic = { size = 1, size_dist = \"Hadoop\" }\n",
            "remove one",
        ),
        (
            "flow_count = 3\ntraffic = { size_dist = \"Hadop\" }\n",
            "WebSearch",
        ),
        (
            "flow_count = 3\ntraffic = { size_dist = [[1, 0.0], [5, 0.9]] }\n",
            "must end at 1",
        ),
        (
            "flow_count = 3\nload = 0.0\ntraffic = { size = 1000 }\n",
            "above 0",
        ),
        (
            "flow_count = 3\nload = 0.5\ntraffic = { duration = 1.0, arr_dist = 0.1 }\n",
            "known size",
        ),
    ] {
        let message = error(&file(set));
        assert!(message.contains(part), "{set}: {message}");
    }
}
