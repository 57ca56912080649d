//! Random files of every kind of network and traffic, and random mistakes in them.

use proptest::prelude::*;
use slipstream_config::doc::Doc;
use slipstream_netsim::output::notes;
use slipstream_netsim::{Execution, Simulation, config as reader};

use crate::common::{config, run_on};

/// A drawn file, one key per line.
#[derive(Clone, Debug)]
struct Draw {
    seed: u64,
    topology: usize,
    delay_ns: u64,
    rate: u64,
    capacity: u32,
    queue: usize,
    loss: f64,
    routing: &'static str,
    failure: usize,
    flows: Vec<(usize, u64, u64)>,
    workload: usize,
    duration: f64,
}

const TRANSPORTS: [&str; 9] = [
    "NewReno",
    "CUBIC",
    "DCTCP",
    "BBR",
    "RoCE",
    "RoCE line",
    "RoCE window",
    "NDP",
    "packets",
];

fn draw() -> impl Strategy<Value = Draw> {
    let flow = (0..TRANSPORTS.len(), 1u64..200_000, 0u64..2_000);
    (
        (0u64..1_000_000, 0usize..6, 0u64..200_000),
        prop::sample::select(vec![50_000_000u64, 1_000_000_000, 10_000_000_000]),
        prop_oneof![Just(0u32), 4u32..200],
        0usize..10,
        prop_oneof![3 => Just(0.0), 1 => 0.0f64..0.02],
        prop::sample::select(vec!["ShortestPath", "ECMP", "Spray"]),
        0usize..4,
        prop::collection::vec(flow, 1..6),
        0usize..5,
        prop::sample::select(vec![0.002, 0.1, 3.0]),
    )
        .prop_map(
            |(
                (seed, topology, delay_ns),
                rate,
                capacity,
                queue,
                loss,
                routing,
                failure,
                flows,
                workload,
                duration,
            )| Draw {
                seed,
                topology,
                delay_ns,
                rate,
                capacity,
                queue,
                loss,
                routing,
                failure,
                flows,
                workload,
                duration,
            },
        )
}

impl Draw {
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            "dialect = \"slipstream\"".to_owned(),
            format!("seed = {}", self.seed),
            format!("duration = {}", self.duration),
        ];
        let mut add = |text: &str| lines.extend(text.lines().map(str::to_owned));
        // Hosts 0 to 3 exist in all of them.
        let (graph, link) = match self.topology {
            0 => (
                "",
                "[topology]\ncategory = \"FatTree\"\n[topology.fat_tree]\nk = 4\nhosts_per_edge = 2",
            ),
            1 => (
                "",
                "[topology]\ncategory = \"LeafSpine\"\n[topology.leaf_spine]\nleaves = 3\nspines = 2\nhosts_per_leaf = 2",
            ),
            2 => (
                "",
                "[topology]\ncategory = \"Torus\"\n[topology.torus]\ndim = 2\nn = 3",
            ),
            3 => (
                "",
                "[topology]\ncategory = \"Dragonfly\"\n[topology.dragonfly]\np = 1\na = 2\nh = 1",
            ),
            4 => (
                "edges = [[0, 1], [1, 2], [2, 3], [3, 0]]\nhosts = [0, 1, 2, 3]",
                "",
            ),
            _ => (
                "edges = [[4, 5, 1e8], [4, 6], [6, 5]]\nhost_nodes = [4, 5, 4, 5]",
                "",
            ),
        };
        add(graph);
        add(link);
        add(&format!(
            "[link]\nhost_links = true\npropagation_ns = {}",
            self.delay_ns
        ));
        add(&format!(
            "[routing]\npolicy = \"{}\"\nspray_paths = 4\nconvergence = 0.001",
            self.routing
        ));
        add(&format!(
            "[switch]\nport_rate = {}\nloss = {}",
            self.rate, self.loss
        ));
        let some = self.capacity.max(8);
        match self.queue {
            0 | 1 => add(&format!("capacity = {}", self.capacity)),
            2 => add(&format!("capacity = {some}\ndrop = \"RED\"")),
            3 => add(&format!(
                "capacity = {some}\ndrop = \"RED_ECN\"\n[switch.red]\nmin = 0.2\nmax = 0.8"
            )),
            4 => add(&format!(
                "capacity = {some}\ndrop = \"ECN_THRESHOLD\"\necn_threshold = {}",
                some / 4
            )),
            5 => {
                add(
                    "drop = \"ECN_RAMP\"\n[switch.ecn_ramp]\nkmin = 5000\nkmax = 50000\npmax = 0.1",
                );
            }
            6 => add(&format!(
                "capacity = {some}\ndiscipline = \"DRR\"\nweights = [1, 2]"
            )),
            7 => add(&format!(
                "discipline = \"SP\"\npriorities = [1, 2]\ncapacity_bytes = {}",
                10_000 * some
            )),
            8 => add("[switch.shared]\nbytes = 100000\nalpha = 0.5\n[switch.pfc]\nalpha = 0.25"),
            _ => add("drop = \"Trim\"\n[switch.trim]\ndata = 8"),
        }
        for (i, &(transport, size, start_us)) in self.flows.iter().enumerate() {
            let (src, dst) = (
                (i + self.seed as usize) % 4,
                (i + 1 + self.seed as usize / 4 % 3) % 4,
            );
            let dst = if src == dst { (dst + 1) % 4 } else { dst };
            add(&format!(
                "[[flow]]\ngraph = [[{src}, {dst}]]\nclass = {}",
                i % 2
            ));
            add(&traffic(transport, size, start_us, "flow"));
        }
        let (transport, size, _) = self.flows[0];
        match self.workload {
            1 => {
                add("[[flow_set]]\npairing = \"Incast\"\nflow_count = 5");
                add(&traffic(transport, size, 0, "flow_set"));
            }
            2 => {
                add("[[flow_set]]\npairing = \"Permutation\"\nload = 0.4\nflow_count = 6");
                add(&traffic(transport, size, 0, "flow_set"));
            }
            3 if transport != 8 => {
                add("[[collective]]\ncollective_type = \"RingAllReduce\"\nsources = [0, 1, 2, 3]");
                add(&traffic(transport, size.max(8), 0, "collective"));
            }
            4 if transport != 8 => {
                add(
                    "[[collective]]\ncollective_type = \"AllToAll\"\nsources = [0, 1, 2]\nskew = 0.5",
                );
                add(&traffic(transport, size.max(8), 0, "collective"));
            }
            _ => {}
        }
        match self.failure {
            1 => add("[[failure]]\nat = 0.0004\nrepair = 0.003\nhost = 1"),
            2 => add("[[failure]]\nat = 0.0001\nhost = 0"),
            _ => {}
        }
        lines.retain(|line| !line.is_empty());
        lines
    }
}

fn traffic(transport: usize, size: u64, start_us: u64, table: &str) -> String {
    let kind = match TRANSPORTS[transport] {
        "RoCE" | "RoCE line" | "RoCE window" => "RoCE",
        "NDP" => "NDP",
        "packets" => "PacketDistribution",
        _ => "TCP",
    };
    let details = match TRANSPORTS[transport] {
        "RoCE" => String::new(),
        "RoCE line" => format!("[{table}.traffic.roce]\ndcqcn = false\nack_every = 3"),
        "RoCE window" => format!("[{table}.traffic.roce]\nwindow = 20000\nrto = 0.002"),
        "NDP" => format!("[{table}.traffic.ndp]\nwindow = 12"),
        "packets" => "arr_dist = 2e-6".to_owned(),
        control => format!(
            "[{table}.traffic.tcp]\ncc_algorithm = \"{control}\"\nrto_min = 0.002\ninitial_window = 10"
        ),
    };
    format!(
        "flow_type = \"{kind}\"\nheader_bytes = 40\n[{table}.traffic]\nsize = {size}\npkt_size_dist = 1000\n\
         initial_delay = {}\n{details}",
        start_us as f64 / 1e6
    )
}

/// A mistake in one line: what a hurried user writes.
fn mistake(line: &str, kind: usize) -> Option<String> {
    let (key, value) = line.split_once(" = ")?;
    let number = value.parse::<f64>().is_ok();
    Some(match kind {
        0 => format!("{key}_ = {value}"),
        1 => format!("{} = {value}", key.to_uppercase()),
        2 if number => format!("{key} = \"{value} KB\""),
        3 if number => format!("{key} = -7"),
        4 if number => format!("{key} = 1e30"),
        5 if number => format!("{key} = nan"),
        6 => format!("{key} = [true]"),
        7 => format!("{key} = {{}}"),
        8 if value.starts_with('"') => format!("{key} = \"{}s\"", value.trim_matches('"')),
        9 if number => format!("{key} = 0"),
        _ => return None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Packets are conserved, threads do not matter, and each flow finishes or is in a note.
    #[test]
    fn any_network_runs_to_an_accounted_end(file in draw()) {
        let toml = file.lines().join("\n");
        let parsed = reader::read(Doc::parse("t.toml", toml.as_bytes()));
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(errors) => {
                // Only combinations that the documentation excludes.
                let text = errors.to_string();
                let known = text.contains("trimming ports");
                prop_assert!(known, "{text}\n{toml}");
                return Ok(());
            }
        };
        let result = run_on(&toml, 1);
        prop_assert_eq!(result.broken_law(), None, "{}", toml);
        for threads in [2, 3] {
            prop_assert_eq!(run_on(&toml, threads).digest, result.digest, "{} threads\n{}", threads, toml);
        }
        let sized = parsed.scenario.flows.iter().zip(&result.flows);
        let open: Vec<u64> = sized
            .filter(|(spec, flow)| spec.demand.bytes().is_some() && flow.delivered_ns.is_none())
            .map(|(_, flow)| flow.id)
            .collect();
        if !open.is_empty() && result.deadlock.is_none() {
            let notes = notes(&config(&toml), &result).join("\n");
            let named = open.iter().take(1).all(|id| notes.contains(&id.to_string()));
            prop_assert!(named, "{open:?} not in {notes}\n{toml}");
        }
    }

    /// A mistake is refused with its line and its key, or it is a value that can be simulated.
    #[test]
    fn a_mistake_in_a_file_is_an_error_at_its_line(
        file in draw(),
        at in any::<prop::sample::Index>(),
        kind in 0usize..10,
    ) {
        let mut lines = file.lines();
        let keys: Vec<usize> = (0..lines.len())
            .filter(|&i| mistake(&lines[i], kind).is_some())
            .collect();
        prop_assume!(!keys.is_empty());
        let line = keys[at.index(keys.len())];
        let wrong = mistake(&lines[line], kind).expect("chosen so");
        lines[line] = wrong.clone();
        let toml = lines.join("\n");
        let key = wrong.split(" = ").next().unwrap_or_default();
        match reader::read(Doc::parse("t.toml", toml.as_bytes())) {
            Err(errors) => {
                // A required key that is misspelled is missing as well: then the table is named.
                let place = format!("t.toml:{}:", line + 1);
                // A number that does not fit another key is reported at either of the two.
                let value = [3, 4, 9].contains(&kind);
                let hit = errors.iter().map(ToString::to_string).any(|e| {
                    (value || e.starts_with(&place)) && e.contains(key)
                });
                let excluded = errors.to_string().contains("trimming ports");
                prop_assert!(hit || excluded, "`{wrong}` at line {}: {errors}\n{toml}", line + 1);
            }
            Ok(parsed) => {
                let syntax = [0, 1, 2, 5, 6, 8].contains(&kind);
                prop_assert!(!syntax, "accepted `{wrong}`\n{toml}");
                // The set-up may still refuse it; neither may panic.
                let _ = Simulation::new(parsed.scenario, Execution::default()).err();
            }
        }
    }
}

/// Each key that the first file mentions in a comment can be set as it stands there, alone.
#[test]
fn keys_in_comments_of_the_first_file_exist() {
    let starter = reader::STARTER;
    assert!(
        run_on(starter, 1)
            .flows
            .iter()
            .all(|f| f.delivered_ns.is_some())
    );
    let mut tried = 0;
    for (at, line) in starter.lines().enumerate() {
        let Some((key, _)) = line
            .strip_prefix("# ")
            .and_then(|key| key.split_once(" = "))
        else {
            continue;
        };
        if key.contains(' ') {
            continue;
        }
        let mut lines: Vec<&str> = starter.lines().collect();
        lines[at] = &line[2..];
        let mut toml = lines.join("\n");
        // A topology needs its category.
        for (table, category) in [
            ("leaf_spine", "LeafSpine"),
            ("torus", "Torus"),
            ("dragonfly", "Dragonfly"),
        ] {
            if key == table {
                let tree = "fat_tree = { k = 8, hosts_per_edge = 4 }";
                toml = toml
                    .replace("\"FatTree\"", &format!("{category:?}"))
                    .replace(tree, "");
            }
        }
        let read = reader::read(Doc::parse("net.toml", toml.as_bytes()));
        assert!(read.is_ok(), "{line}: {}", read.err().unwrap());
        tried += 1;
    }
    assert!(tried >= 15, "{tried}");
}
