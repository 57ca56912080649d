//! Graphs with individual links, several hosts per node, and flows from a list.

use std::io::{BufRead, Cursor};
use std::path::Path;

use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Config, Resources};
use slipstream_netsim::topology::{Graph, HostOrder};
use slipstream_netsim::{Execution, Simulation};

use crate::common::{error, run};
use crate::conservation::check_balance;

const PACKET: &str = "flow_type = \"PacketDistribution\"\n\
    traffic = { size = 1250, arr_dist = 0.0, pkt_size_dist = 1250 }\n";

/// Three switches in a row; the second link has its own rate and delay.
fn row(edges: &str) -> String {
    format!(
        "duration = 1.0\nedges = {edges}\nhosts = [0, 2]\n[link]\nhost_links = false\n\
         propagation_ns = 1000\n[switch]\nport_rate = 1e9\n[[flow]]\ngraph = [[0, 2]]\n{PACKET}\
         [[flow]]\ngraph = [[2, 0]]\n{PACKET}"
    )
}

#[test]
fn an_edge_may_have_its_own_rate_and_delay() {
    // 1,250 bytes: 10,000 ns at 1 Gb/s, 100,000 at 100 Mb/s; both directions are equal.
    for (edges, ns) in [
        ("[[0, 1], [1, 2]]", 22_000),
        ("[[0, 1], [1, 2, 1e8]]", 10_000 + 1_000 + 100_000 + 1_000),
        (
            "[[0, 1], [1, 2, 1e8, 5000]]",
            10_000 + 1_000 + 100_000 + 5_000,
        ),
        (
            "[[0, 1, 1e9, 0], [1, 2, 1e8, 5000]]",
            10_000 + 100_000 + 5_000,
        ),
    ] {
        let result = run(&row(edges));
        for flow in &result.flows {
            assert_eq!(flow.delivered_ns, Some(ns), "{edges}");
        }
        assert_eq!(result.ideal_ns, [ns, ns], "{edges}");
        check_balance(&row(edges));
    }
}

#[test]
fn invalid_edges_are_refused() {
    for (edges, part) in [
        ("[[0, 1], [1, 2, 0.0]]", "out of range"),
        ("[[0, 1], [1, 2, 1e9, -1]]", "out of range"),
        ("[[0, 1], [1, 2, 1e9, 3e9]]", "out of range"),
        ("[[0, 1], [1, 2, 1e9, 5, 6]]", "does not have two nodes"),
        ("[[0, 1], [1.5, 2]]", "does not have two nodes"),
        ("[[0, 1], [1]]", "does not have two nodes"),
    ] {
        let message = error(&row(edges));
        assert!(message.contains(part), "{edges}: {message}");
    }
    let many: Vec<String> = (0..300)
        .map(|i| format!("[0, {}, {}]", i + 1, 1_000 + i))
        .collect();
    let message = error(&row(&format!("[{}]", many.join(", "))));
    assert!(message.contains("253 different"), "{message}");
}

/// Hosts 0 and 1 on the first switch, 2 and 3 on the second.
fn shared(flows: &str) -> String {
    format!(
        "duration = 1.0\nedges = [[0, 1]]\nhost_nodes = [0, 0, 1, 1]\n[link]\nhost_links = true\n\
         propagation_ns = 1000\n[switch]\nport_rate = 1e9\n{flows}"
    )
}

#[test]
fn a_node_may_have_several_hosts() {
    let flow = |src: u32, dst: u32| format!("[[flow]]\ngraph = [[{src}, {dst}]]\n{PACKET}");
    let result = run(&shared(&(flow(0, 1) + &flow(1, 3))));
    // Two links on one switch, three between the two switches.
    assert_eq!(result.flows[0].delivered_ns, Some(22_000));
    assert_eq!(result.flows[1].delivered_ns, Some(33_000));
    assert!(error(&shared(&flow(0, 4))).contains("hosts are 0 to 3"));
    // Patterns are by switch.
    let set =
        "[[flow_set]]\npairing = \"SwitchOffsetHalf\"\nflow_count = 4\ntraffic = { size = 1 }\n";
    let result = run(&shared(set));
    let pairs: Vec<_> = result.flows.iter().map(|f| (f.src, f.dst)).collect();
    assert_eq!(pairs, [(0, 2), (1, 3), (2, 0), (3, 1)]);
    check_balance(&shared(set));
    let both = shared("").replace("[link]", "hosts = [0]\n[link]");
    assert!(error(&both).contains("host_nodes"));
}

/// A list in a file with this name.
fn with_list(name: &str, list: &str, content: &str, memory: u64) -> Result<Config, String> {
    let toml = format!("{}[[flow_list]]\nfile = \"{name}\"\n{list}", shared(""));
    let open = |path: &Path| -> Result<Box<dyn BufRead>, String> {
        assert_eq!(path.to_string_lossy(), format!("some/{name}"));
        Ok(Box::new(Cursor::new(content.to_owned())))
    };
    let resources = Resources {
        open: &open,
        memory_bytes_max: memory,
    };
    let doc = Doc::parse("some/net.toml", toml.as_bytes());
    config::read_with(doc, &resources).map_err(|diagnostics| diagnostics.to_string())
}

#[test]
fn flows_come_from_a_list() {
    let list = "class = 1\n[flow_list.traffic]\ninitial_delay = 1e-6\ntcp = { rto_min = 0.01 }\n";
    let rows = "src,dst,bytes,start_ns,class\n0,2,1000,500,\n1,3,2000,0,4\n2,0,1,,\n";
    let config = with_list("f.csv", list, rows, u64::MAX).unwrap();
    let flows: Vec<_> = config.scenario.flows.iter().collect();
    let got: Vec<_> = flows
        .iter()
        .map(|f| (f.id, f.src, f.dst, f.demand.bytes(), f.start_ns, f.class))
        .collect();
    assert_eq!(
        got,
        [
            (0, 0, 2, Some(1000), 1_500, 1),
            (1, 1, 3, Some(2000), 1_000, 4),
            (2, 2, 0, Some(1), 1_000, 1)
        ]
    );
    // The same flows as `[[flow]]` tables give the same run.
    let flow = |(src, dst, bytes, at)| {
        format!(
            "[[flow]]\ngraph = [[{src}, {dst}]]\n[flow.traffic]\nsize = {bytes}\n\
             initial_delay = {at}\ntcp = {{ rto_min = 0.01 }}\n"
        )
    };
    let rows = [(0, 2, 1000, 1.5e-6), (1, 3, 2000, 1e-6), (2, 0, 1, 1e-6)];
    let written = rows.map(flow).concat();
    let execution = Execution::default();
    let mut listed = Simulation::new(config.scenario, execution).unwrap();
    listed.run(execution, u64::MAX, &mut |_, _| ());
    assert_eq!(listed.result().digest, run(&shared(&written)).digest);
}

#[test]
fn invalid_lists_are_refused_with_file_and_line() {
    let csv = |rows: &str| format!("src,dst,bytes\n{rows}");
    for (name, list, content, part) in [
        (
            "f.csv",
            "",
            csv("0,4,10\n"),
            "f.csv:2: `dst`: topology: host 4",
        ),
        (
            "f.csv",
            "",
            csv("0,1,10\n1,1,10\n"),
            "f.csv:3: host 1 sends to itself",
        ),
        ("f.csv", "", csv("0,1\n"), "f.csv:2: 2 cells"),
        (
            "f.csv",
            "traffic = { size = 5 }\n",
            csv("0,1,10\n"),
            "comes from the list",
        ),
        ("f.txt", "", csv("0,1,10\n"), ".jsonl"),
    ] {
        let message = with_list(name, list, &content, u64::MAX).unwrap_err();
        assert!(message.contains(part), "{content}: {message}");
    }
    let twice = "id,src,dst,bytes\n7,0,1,10\n7,1,0,10\n";
    let message = with_list("f.csv", "", twice, u64::MAX).unwrap_err();
    assert!(
        message.contains("f.csv:3: the flow number 7 is also that of some/f.csv:2"),
        "{message}"
    );
    // A list that exceeds memory is refused at once, not at its end.
    let message = with_list("f.csv", "", &csv(&"0,1,10\n".repeat(10_000)), 1 << 20).unwrap_err();
    assert!(message.contains("MiB at hand"), "{message}");
}

#[test]
fn graphs_with_too_many_links_or_hosts_are_refused_before_creation() {
    let dragonfly = |p, a, h| Graph::dragonfly(p, a, h, HostOrder::BySwitch);
    for (graph, part) in [
        // 100,100 routers and 10^10 hosts; 5 * 10^11 links; numbers beyond 64 bits.
        (dragonfly(100_000, 100, 10), "10010000000 hosts"),
        (dragonfly(1, 1, 999_999), "500000000000 links"),
        (dragonfly(u32::MAX, u32::MAX, u32::MAX), "1000000 routers"),
        (Graph::rails(1_000_000, 1, 1, 8_192), "8192000000 links"),
    ] {
        let message = graph.expect_err(part).to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn collectives_that_exceed_the_limit_are_refused_before_creation() {
    // 65,536 hosts.
    let network = "duration = 1.0\n[topology]\ncategory = \"FatTree\"\n[topology.fat_tree]\nk = 64\n\
                   hosts_per_edge = 32\n[switch]\nport_rate = 1e9\n[[collective]]\nsinks = []\n";
    let sources: Vec<u32> = (0..65_536).collect();
    for (kind, flows) in [("RingAllReduce", "8589803520"), ("AllToAll", "4294901760")] {
        let toml = format!(
            "{network}collective_type = \"{kind}\"\nsources = {sources:?}\ntraffic = {{ size = 1_000_000 }}\n"
        );
        let message = error(&toml);
        assert!(
            message.contains(&format!("{flows} flows exceed")),
            "{message}"
        );
    }
}

#[test]
fn flows_that_exceed_memory_are_refused_before_creation() {
    let set =
        |count: u64| format!("[[flow_set]]\nflow_count = {count}\ntraffic = {{ size = 1 }}\n");
    // A graph is one partition, whose flows have 20-bit indexes.
    let message = error(&shared(&set(10_000_000)));
    assert!(message.contains("1048576"), "{message}");
    let message = error(&shared(&set(10_000_001)));
    assert!(message.contains("10000000"), "{message}");
}

#[test]
fn a_cluster_file_is_one_error() {
    assert_eq!(
        error("# a cluster\n[model]\npreset = \"qwen3-8b\"\n[network]\nmode = \"flows\"\n"),
        "test.toml:2:2: this is a cluster file, not a file of `slipstream net run`: it has `model`\n\
         hint: give it to `slipstream simulate`"
    );
}
