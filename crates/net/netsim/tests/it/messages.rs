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

/// The same for the pauses of Days' files, whose classes have priorities.
#[test]
fn drops_of_lossless_priorities_are_noted() {
    for (priority, xoff, lossless, drops) in [
        (3, 200_000, true, true),
        (3, 5_000, true, false),
        (0, 200_000, true, true),
        (3, 0, false, true),
    ] {
        let toml = format!(
            "{}priority = {priority}\n[link.pfc]\nhost_links = true\nxoff = {:?}\nxon = {:?}\n",
            incast("", "").replace("host_links = true", "host_links = true\nmode = \"Pfc\""),
            [xoff; 8],
            [xoff / 2; 8],
        );
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
            drops && lossless,
            "{priority} {xoff}: {notes}"
        );
        let late = config(&toml).notes.join("\n");
        let beyond = xoff == 200_000 && late.contains("paused at 200000 waiting bytes");
        assert_eq!(beyond, xoff == 200_000 && 256 * 1_460 <= 200_000, "{late}");
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
        (
            network("capacity = 64\npfc = { xoff = 1000, alpha = 0.5 }\n[[flow]]\ngraph = [[0, 1]]\ntraffic = { size = 1 }\n"),
            "`switch.pfc.alpha` conflicts with `xoff`",
        ),
        (
            network("discipline = \"DRR\"\nweights = [2, 1]\n[[flow]]\nclass = 5\ngraph = [[0, 1]]\ntraffic = { size = 1 }\n"),
            "flow 0 has class 5, but `switch.discipline` has the classes 0 to 1",
        ),
        (
            "duration = 1.0\nedges = \"0-2, 1-2\"\nhosts = [0, 1]\n[switch]\nport_rate = 1e9\n".to_owned() + pair,
            "net.toml:2:9: `edges` is a string",
        ),
        (
            "[topology]\ncategory = \"leafspine\"\nleaf_spine = { leaves = 2, spines = 2 }\n[switch]\nport_rate = 1e9\n".to_owned() + pair,
            "did you mean \"LeafSpine\"",
        ),
        (
            flow("[[0, 1]]", "size = 1").replace("[switch]", "[switch"),
            "net.toml:4:",
        ),
    ] {
        let all = errors(&toml);
        assert_eq!(all.len(), 1, "{toml}\n{all:#?}");
        assert!(all[0].contains(part), "{toml}\n{all:#?}");
    }
}

/// Files in which each line below is a key that can be wrong.
fn whole_files() -> [String; 4] {
    let tree =
        "[topology]\ncategory = \"FatTree\"\n[topology.fat_tree]\nk = 4\nhosts_per_edge = 2\n";
    let leaves = "[topology]\ncategory = \"LeafSpine\"\n[topology.leaf_spine]\nleaves = 2\nspines = 2\nhosts_per_leaf = 2\n";
    let graph = "edges = [[0, 2], [1, 2], [3, 2]]\nhosts = [0, 1, 3]\n";
    let rest = |switch: &str, traffic: &str| {
        format!(
            "[link]\npropagation_ns = 1000\nhost_links = true\n[routing]\npolicy = \"ECMP\"\n[switch]\nport_rate = 1e9\n\
             capacity = 64\n{switch}\n{traffic}"
        )
    };
    let tcp = "[[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 1]]\nheader_bytes = 40\n[flow.traffic]\nsize = 1000\n\
               [flow.traffic.tcp]\ncc_algorithm = \"CUBIC\"\ninitial_window = 10\nssthresh = 100000\nrto_min = 0.01\nrto_initial = 0.1\n";
    let roce = "[[flow]]\nflow_type = \"RoCE\"\ngraph = [[0, 1]]\nclass = 1\n[flow.traffic]\nsize = 1000\n[flow.traffic.roce]\nrto = 0.01\nwindow = 100000\nack_every = 2\n";
    let ring = "[[collective]]\nname = \"a\"\ncollective_type = \"RingAllReduce\"\nsources = [0, 1, 2]\n[collective.traffic]\nsize = 1000\n\
                [[collective]]\nafter = \"a\"\ncollective_type = \"AllGather\"\nsources = [0, 1, 2]\ncompute_s = 0.001\n[collective.traffic]\nsize = 1000\n";
    let head = "seed = 1\nduration = 0.1\n";
    [
        format!(
            "{head}{tree}{}",
            rest("drop = \"ECN_THRESHOLD\"\necn_threshold = 20", tcp)
        ),
        format!(
            "{head}{leaves}{}",
            rest(
                "discipline = \"DRR\"\nweights = [1, 2]\n[switch.pfc]\nxoff = 20000\nxon_gap = 1000",
                roce
            )
        ),
        format!(
            "{head}{graph}{}",
            rest(
                "drop = \"ECN_RAMP\"\n[switch.ecn_ramp]\nkmin = 5000\nkmax = 20000\npmax = 0.1",
                tcp
            )
        ),
        format!("{head}{tree}{}", rest("loss = 0.01", ring)),
    ]
}

/// A wrong value is one error that names its line, without consequences; so is a broken table header.
#[test]
fn a_wrong_value_is_one_error_at_its_line() {
    let (mut refused, mut faults) = (0, Vec::new());
    for file in whole_files() {
        config(&file);
        for (at, line) in file.lines().enumerate() {
            let changes: Vec<String> = if let Some((key, _)) = line.split_once(" = ") {
                [
                    "\"x\"", "-7", "[]", "true", "{}", "nan", "1e300", "[[]]", "'",
                ]
                .iter()
                .map(|value| format!("{key} = {value}"))
                .collect()
            } else {
                vec![
                    line.replace(']', ""),
                    format!("{line} x"),
                    line.replacen('[', "[.", 1),
                ]
            };
            let links = line.starts_with("name") || line.starts_with("after");
            for change in changes
                .iter()
                .filter(|change| !(links && change.ends_with("\"x\"")))
            {
                let mut lines: Vec<&str> = file.lines().collect();
                lines[at] = change;
                let toml = lines.join("\n");
                let Err(all) = config::read(Doc::parse("net.toml", toml.as_bytes())) else {
                    continue;
                };
                refused += 1;
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                if all.len() != 1 || !all[0].starts_with(&format!("net.toml:{}:", at + 1)) {
                    faults.push(format!("line {}: {change}: {all:#?}", at + 1));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(refused > 500, "{refused}");
}

#[test]
fn timeouts_of_0_are_refused() {
    for (kind, key) in [("RoCE", "roce"), ("NDP", "ndp")] {
        for value in ["0.0", "0", "1e-7", "-1.0"] {
            let toml = flow(
                "[[0, 1]]",
                &format!("size = 1, {key} = {{ rto = {value} }}"),
            )
            .replace("[[flow]]", &format!("[[flow]]\nflow_type = \"{kind}\""));
            let all = errors(&toml);
            assert!(
                all.len() == 1 && all[0].contains("from 1e-6 to 1e9 s"),
                "{all:?}"
            );
        }
    }
    let all = errors(&flow(
        "[[0, 1]]",
        "size = 1, tcp = { rto_initial = 0, rto_min = 0 }",
    ));
    assert!(
        all.len() == 1 && all[0].contains("from 1e-6 to 60 s"),
        "{all:?}"
    );
    config(&flow("[[0, 1]]", "size = 1, tcp = { rto_min = 0 }"));
}

/// `name` and `after` belong to both dialects: a chain of rings needs no `sinks`.
#[test]
fn a_chain_of_collectives_runs_in_our_dialect() {
    let chain = &whole_files()[3];
    for toml in [
        chain.replace("loss = 0.01\n", ""),
        chain.replace("loss = 0.01", "discipline = \"FIFO\""),
    ] {
        let result = run(&toml);
        assert!(result.flows.iter().all(|f| f.delivered_ns.is_some()));
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
