//! Notes about settings that make a result meaningless, and none about other runs.

use slipstream_netsim::output::{Cost, html, notes, text};

use crate::common::{config, example, json, run};

fn noted(toml: &str) -> Vec<String> {
    notes(&config(toml), &run(toml))
}

fn tree(duration: f64, switch: &str, set: &str) -> String {
    format!(
        "duration = {duration}\n[topology]\ncategory = \"FatTree\"\nfat_tree = {{ k = 4, hosts_per_edge = 2 }}\n\
         [link]\npropagation_ns = 1000\n[switch]\nport_rate = 1e10\n{switch}\n\
         [[flow_set]]\npairing = \"Permutation\"\nheader_bytes = 64\nack_bytes = 64\n{set}\n"
    )
}

/// Settings, a part of the note, and a change that removes the cause and the note.
fn cases() -> Vec<(String, &'static str, (&'static str, &'static str))> {
    let roce = |more: &str| format!("flow_type = \"RoCE\"\n{more}");
    vec![
        (
            tree(
                1.0,
                "",
                &roce(
                    "routing = \"Spray\"\ntraffic = { size = 1_000_000, roce = { dcqcn = false } }",
                ),
            ),
            "sprayed flows sent",
            ("\"Spray\"", "\"ECMP\""),
        ),
        (
            tree(
                1.0,
                "capacity = 20",
                &roce("routing = \"ECMP\"\ntraffic = { size = 400_000 }"),
            ),
            "flows of DCQCN cross ports that never mark",
            (
                "capacity = 20",
                "capacity = 200\ndrop = \"ECN_RAMP\"\necn_ramp = { kmin = 5000, kmax = 200000 }",
            ),
        ),
        (
            tree(
                1.0,
                "[switch.pfc]\nxoff = 20000",
                &roce("routing = \"ECMP\"\ntraffic = { size = 400_000 }"),
            ),
            "flows of DCQCN cross ports that never mark",
            (
                "traffic = { size = 400_000 }",
                "traffic = { size = 400_000, roce = { dcqcn = false } }",
            ),
        ),
        (
            tree(
                1.0,
                "capacity = 20\ndrop = \"ECN_THRESHOLD\"\necn_threshold = 30",
                "flow_type = \"TCP\"\ntraffic = { size = 400_000, tcp = { cc_algorithm = \"DCTCP\", rto_min = 0.01 } }",
            ),
            "flows of DCTCP cross ports that never mark",
            ("ecn_threshold = 30", "ecn_threshold = 10"),
        ),
        (
            tree(
                1.0,
                "drop = \"Trim\"",
                "flow_type = \"NDP\"\ntraffic = { size = 1_000_000, ndp = { window = 3 } }",
            ),
            "NDP flows have a window of 3 packets",
            ("window = 3", "window = 30"),
        ),
        (
            tree(
                0.0002,
                "",
                "flow_type = \"TCP\"\ntraffic = { size = 1_000_000 }",
            ),
            "had not finished at the end of the run",
            ("duration = 0.0002", "duration = 0.2"),
        ),
        (
            tree(
                0.9,
                "capacity = 4",
                "flow_type = \"TCP\"\ntraffic = { size = 400_000, tcp = { initial_window = 50 } }",
            ),
            "wait for a retransmission timer beyond it, the first at 1.0",
            (
                "initial_window = 50",
                "initial_window = 50, rto_min = 0.005",
            ),
        ),
        (
            tree(
                0.1,
                "drop = \"ECN_RAMP\"\necn_ramp = { kmin = 5, kmax = 200 }",
                &roce("routing = \"ECMP\"\ntraffic = { size = 10_000 }"),
            ),
            "thresholds are bytes, not packets",
            ("kmin = 5, kmax = 200", "kmin = 5000, kmax = 200000"),
        ),
        (
            tree(
                0.1,
                "",
                "flow_type = \"TCP\"\ntraffic = { size = 10_000 }\n[[failure]]\nat = 0.2\nlink = [0, 8]",
            ),
            "the failure at 200.000 ms is after the end",
            ("at = 0.2", "at = 0.02"),
        ),
        (
            format!(
                "report_interval = 0.2\n{}",
                tree(0.1, "", "flow_type = \"TCP\"\ntraffic = { size = 10_000 }")
            ),
            "the first sample at 200.000 ms is after the end",
            ("report_interval = 0.2", "report_interval = 0.02"),
        ),
    ]
}

#[test]
fn a_setting_that_makes_results_meaningless_is_noted() {
    for (toml, part, (from, to)) in cases() {
        let notes = noted(&toml);
        assert!(
            notes.iter().any(|n| n.contains(part)),
            "{part}: {notes:?}\n{toml}"
        );
        let mended = toml.replace(from, to);
        assert_ne!(mended, toml);
        let notes = noted(&mended);
        assert!(
            !notes.iter().any(|n| n.contains(part)),
            "{notes:?}\n{mended}"
        );
    }
}

#[test]
fn notes_are_in_every_output() {
    let (toml, part, _) = cases().remove(5);
    let (config, result, cost) = (config(&toml), run(&toml), Cost::default());
    assert!(text("net.toml", &config, &result, &cost).contains(part));
    assert!(
        json("net.toml", &config, &result)
            .to_string()
            .contains(part)
    );
    assert!(html("net.toml", &config, &result, &cost).contains(part));
}

#[test]
fn healthy_examples_have_no_note() {
    for (name, change) in [
        ("roce-incast.toml", ("4_000_000", "400_000")),
        (
            "ndp-permutation.toml",
            ("k = 16, hosts_per_edge = 8", "k = 4, hosts_per_edge = 2"),
        ),
        ("failures.toml", ("", "")),
        ("web-search.toml", ("span = 0.02", "span = 0.001")),
        ("collectives.toml", ("", "")),
        ("paths.toml", ("", "")),
        ("classes.toml", ("", "")),
        ("dragonfly.toml", ("", "")),
        ("bbr.toml", ("", "")),
    ] {
        let toml = example(name).replacen(change.0, change.1, 1);
        assert_eq!(noted(&toml), Vec::<String>::new(), "{name}");
    }
}
