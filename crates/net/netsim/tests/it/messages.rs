//! Errors of files: one per fault, with the file's own numbers and the line at fault.

use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Config};
use slipstream_netsim::{Execution, Simulation};

use crate::common::{config, run};

/// The errors of reading `toml`.
fn errors(toml: &str) -> Vec<String> {
    match config::read(Doc::parse("net.toml", toml.as_bytes())) {
        Ok(_) => panic!("accepted: {toml}"),
        Err(all) => all.iter().map(ToString::to_string).collect(),
    }
}

/// The error of the set-up, as the command prints it.
fn setup_error(toml: &str) -> String {
    let Config { scenario, .. } = config(toml);
    let made = Simulation::new(scenario, Execution::default());
    let error = made.err().expect("a set-up error");
    config(toml).located("net.toml", &error)
}

fn network(more: &str) -> String {
    format!(
        "duration = 1.0\nedges = [[0, 2], [1, 2], [3, 2]]\nhosts = [0, 1, 3]\n[switch]\n\
         port_rate = 1e9\n{more}"
    )
}

fn flow(graph: &str, traffic: &str) -> String {
    network(&format!(
        "[[flow]]\ngraph = {graph}\ntraffic = {{ {traffic} }}\n"
    ))
}

/// A positive time that would be simulated as 0 is refused under each key.
#[test]
fn times_that_round_to_0_are_refused() {
    let tiny = "1e-10";
    let size = "[[flow]]\ngraph = [[0, 1]]\ntraffic = { size = 1 }\n";
    for (key, toml) in [
        (
            "propagation_ns",
            network(&format!("{size}[link]\npropagation_ns = 1e-6\n")),
        ),
        (
            "propagation_ns",
            network(&format!("{size}[link]\npropagation_ns = 0.49\n")),
        ),
        (
            "edges",
            network(size).replace("[3, 2]", "[3, 2, 1e9, 0.001]"),
        ),
        (
            "duration",
            network(size).replace("duration = 1.0", "duration = 1e-10"),
        ),
        (
            "initial_delay",
            flow("[[0, 1]]", &format!("size = 1, initial_delay = {tiny}")),
        ),
        (
            "at",
            network(&format!("{size}[[failure]]\nat = {tiny}\nlink = [0, 2]\n")),
        ),
        (
            "timer",
            network("").clone()
                + "[[flow]]\nflow_type = \"RoCE\"\ngraph = [[0, 1]]\ntraffic = { size = 1, roce = { dcqcn = { timer = 1e-9 } } }\n",
        ),
    ] {
        let all = errors(&toml).join("\n");
        assert!(
            all.contains(key) && all.contains("must be") || all.contains("out of range"),
            "{key}: {all}"
        );
    }
    for delay in ["0", "0.5", "1", "1000"] {
        config(&network(&format!(
            "{size}[link]\npropagation_ns = {delay}\n"
        )));
    }
}

/// An incast of RoCE flows into one port, with `switch` keys and `dcqcn` keys.
fn incast(switch: &str, dcqcn: &str) -> String {
    format!(
        "duration = 0.02\n[topology]\ncategory = \"LeafSpine\"\nleaf_spine = {{ leaves = 1, spines = 1, hosts_per_leaf = 9 }}\n\
         [link]\npropagation_ns = 1000\nhost_links = true\n[switch]\nport_rate = 1e10\ncapacity = 256\n{switch}\n\
         [[flow]]\nflow_type = \"RoCE\"\ngraph = [[0,8],[1,8],[2,8],[3,8],[4,8],[5,8],[6,8],[7,8]]\n\
         traffic = {{ size = 1_000_000, roce = {{ dcqcn = {{ {dcqcn} }} }} }}\n"
    )
}

/// Settings that make a result meaningless have a note, and usual ones none.
#[test]
fn settings_beyond_the_queue_or_the_run_are_noted() {
    let ramp = |kmin: u32, kmax: u32| {
        format!("drop = \"ECN_RAMP\"\necn_ramp = {{ kmin = {kmin}, kmax = {kmax}, pmax = 0.1 }}")
    };
    let threshold = |packets: u32| format!("drop = \"ECN_THRESHOLD\"\necn_threshold = {packets}");
    let usual = ramp(20_000, 200_000);
    for (switch, dcqcn, part) in [
        (
            ramp(2_000_000, 20_000_000),
            "",
            "the ramp begins at 2000000 bytes",
        ),
        (usual.clone(), "", ""),
        (threshold(65_000), "", "when more than 65000 wait"),
        (threshold(256), "", "when more than 256 wait"),
        (threshold(20), "", ""),
        (
            format!("{usual}\npfc = {{ xoff = 10_000_000 }}"),
            "",
            "paused at 10000000 waiting bytes",
        ),
        (format!("{usual}\npfc = {{ xoff = 20_000 }}"), "", ""),
        (usual.clone(), "timer = 55", "the increase timer of"),
        (usual.clone(), "alpha_timer = 55", "the alpha timer of"),
        (
            usual.clone(),
            "cnp_interval = 50",
            "the notification timer of",
        ),
        (
            usual.clone(),
            "cnp_interval = 0.02",
            "the notification timer of",
        ),
        (usual, "timer = 300e-6, cnp_interval = 4e-6", ""),
    ] {
        let notes = config(&incast(&switch, dcqcn)).notes;
        let found = notes.join("\n");
        assert!(
            if part.is_empty() {
                notes.is_empty()
            } else {
                found.contains(part)
            },
            "{switch} {dcqcn}: {found}"
        );
    }
}

/// PFC whose thresholds do not fit the queue loses packets, which is said.
#[test]
fn drops_of_lossless_classes_are_noted() {
    for (xoff, drops) in [(200_000, true), (5_000, false)] {
        let toml = incast(&format!("pfc = {{ xoff = {xoff} }}"), "");
        let result = run(&toml);
        let totals = &result.totals;
        assert_eq!(
            totals.data_drops + totals.control_drops > 0,
            drops,
            "{totals:?}"
        );
        let notes = slipstream_netsim::output::notes(&config(&toml), &result).join("\n");
        assert_eq!(
            notes.contains("lossless classes were dropped"),
            drops,
            "{notes}"
        );
    }
}

#[test]
fn a_fault_is_one_error_without_consequences() {
    let set = "[[flow_set]]\nflow_count = 2\n";
    let tree = |more: &str, flows: &str| {
        format!(
            "[topology]\ncategory = \"FatTree\"\nfat_tree = {{ {more} }}\n[switch]\nport_rate = 1e9\n{flows}"
        )
    };
    let pair = "[[flow]]\ngraph = [[0, 900]]\ntraffic = { size = 1 }\n";
    for (toml, part) in [
        (flow("[[0, 1]]", "size = \"100KB\""), "net.toml:8"),
        (flow("[[0, 1]]", "size = -1"), "traffic.size"),
        (flow("[[0, 5]]", "size = 1"), "node 5 is not in `hosts`"),
        (flow("[[0]]", "size = 1"), "entry of 1 numbers"),
        (flow("\"0-1\"", "size = 1"), "flow[0].graph"),
        (
            flow("[[0, 1]]", "duration = 0.1, arr_dist = \"often\""),
            "arr_dist",
        ),
        (flow("[[0, 1]]", "size_dist = \"WebSerch\""), "WebSearch"),
        (flow("[[0, 1]]", "size = 1, duration = 1.0"), "net.toml:8"),
        (
            flow("[[0, 1]]", "size_dist = \"WebSearch\", duration = 1.0"),
            "conflicts with the size",
        ),
        (tree("k = 3", pair), "even"),
        (tree("k = 4, hosts_per_edge = 0", pair), "net.toml:3"),
        (
            tree("k = \"four\"", &format!("{set}traffic = {{ size = 1 }}\n")),
            "topology.fat_tree.k",
        ),
        (
            tree(
                "k = 3",
                "[[failure]]\nat = 0.1\nhost = 700\n[[collective]]\ncollective_type = \
             \"RingAllReduce\"\nsources = [0, 300, 600]\ntraffic = { size = 9 }\n",
            ),
            "even",
        ),
        (
            network(
                "drop = \"ECN_RAMP\"\necn_ramp = { kmin = 9, kmax = 8 }\n[[flow]]\ngraph = [[0, 1]]\n\
             traffic = { size = 1 }\n",
            ),
            "`kmin` (9 bytes) is above `kmax` (8 bytes)",
        ),
        (
            network(
                "[switch.pfc]\nxoff = 1000\nxon_gap = 1001\n[[flow]]\ngraph = [[0, 1]]\n\
             traffic = { size = 1 }\n",
            ),
            "xon_gap",
        ),
    ] {
        let all = errors(&toml);
        assert_eq!(all.len(), 1, "{toml}\n{all:#?}");
        assert!(all[0].contains(part), "{toml}\n{all:#?}");
    }
}

#[test]
fn errors_of_the_setup_have_the_files_numbers_and_lines() {
    // Hosts 1 and 3 have the indexes 1 and 2.
    let apart = "edges = [[0, 1], [2, 3]]\nhosts = [0, 1, 3]\n[switch]\nport_rate = 1e9\n\
                 [[flow]]\ngraph = [[0, 1]]\ntraffic = { size = 1 }\n\
                 [[flow]]\nflow_id = 7\ngraph = [[1, 3]]\ntraffic = { size = 1 }\n";
    let message = setup_error(apart);
    assert!(
        message.starts_with("net.toml:10") || message.starts_with("test.toml:10"),
        "{message}"
    );
    assert!(
        message.contains("flow 7: no path leads from host 1 to host 3"),
        "{message}"
    );
    let same = network("[[flow]]\ngraph = [[3, 3]]\ntraffic = { size = 1 }\n");
    let message = setup_error(&same);
    assert!(
        message.contains(":7: flow 0: host 3 sends to itself"),
        "{message}"
    );
    let twice = network(
        "[[flow]]\nflow_id = 1\ngraph = [[0, 3]]\ntraffic = { size = 1 }\n\
         [[flow]]\nflow_id = 1\ngraph = [[0, 1]]\ntraffic = { size = 1 }\n",
    );
    assert!(setup_error(&twice).contains("used twice"));
    let value =
        network("capacity_bytes = 9\n[[flow]]\ngraph = [[0, 3]]\ntraffic = { size = 99 }\n");
    assert!(setup_error(&value).starts_with("net.toml: `switch.capacity_bytes`"));
}

fn rails(gpus: u32, per_server: u32, pair: &str) -> String {
    format!(
        "seed = 1\nduration = 0.01\n[topology]\ncategory = \"SpectrumX\"\n[topology.spectrum_x]\n\
         gpus = {gpus}\ngpus_per_server = {per_server}\nnics_per_asw = 64\npsws = 64\n\
         gpu_type = \"A100\"\nnic_rate_bps = 100000000000\nuplink_rate_bps = 400000000000\n\
         nvlink_rate_bps = 2400000000000\nlink_delay_ns = 500\nnvlink_delay_ns = 25\n[switch]\n\
         capacity = 300\ndiscipline = \"FIFO\"\ndrop = \"TailDrop\"\n[[flow]]\nflow_type = \"TCP\"\n\
         graph = [{pair}]\ntraffic = {{ size = 100000 }}\n"
    )
}

#[test]
fn a_rail_fabric_may_be_smaller_than_a_segment() {
    // SimAI's fabric of 128 GPUs: 16 servers of the 64 that a segment may have.
    let topology = config(&rails(128, 8, "[0, 9]")).scenario.topology;
    assert_eq!(
        (topology.node_count(), topology.host_count()),
        (8 + 64, 128)
    );
    for (gpus, per_server, pair) in [
        (128, 8, "[0, 9]"),
        (128, 8, "[0, 8]"),
        (8, 4, "[0, 7]"),
        (12, 8, "[0, 8]"),
        (1024, 8, "[0, 1023]"),
    ] {
        let toml = rails(gpus, per_server, pair);
        let result = run(&toml);
        assert!(result.flows[0].delivered_ns.is_some(), "{gpus} {pair}");
        // GPUs of one rail and segment share a leaf; others are connected by a spine.
        let hops = result.totals.packet_hops / result.totals.sent;
        assert_eq!(hops, if pair == "[0, 8]" { 2 } else { 4 }, "{gpus} {pair}");
    }
    for gpus in [513, 1000, 1536 + 8] {
        let all = errors(&rails(gpus, 8, "[0, 900]"));
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(
            all[0].contains("multiple of 512, or at most that many"),
            "{all:?}"
        );
    }
}
