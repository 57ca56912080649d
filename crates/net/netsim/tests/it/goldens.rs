//! Golden results of the examples. A change of a model changes these on purpose; any other change
//! must not. They are the same on every machine: no clocks, no system math library.

use crate::common::{example, run, run_on};

/// Finished flows, data packets, drops, digest.
fn check_golden(name: &str, change: &[(&str, &str)], expected: (usize, u64, u64, u64)) {
    let mut toml = example(name);
    for (from, to) in change {
        assert!(toml.contains(from), "{name} has no `{from}`");
        toml = toml.replace(from, to);
    }
    let result = run(&toml);
    let done = result.flows.iter().filter(|f| f.delivered_ns.is_some());
    let sent: u64 = result.flows.iter().map(|f| f.packets_sent).sum();
    let drops = result.totals.data_drops + result.totals.control_drops;
    let got = (done.count(), sent, drops, result.digest);
    assert_eq!(got, expected, "{name}: digest {:#018x}", result.digest);
    // Every feature on several threads.
    for threads in [2, 3, 4] {
        assert_eq!(
            run_on(&toml, threads),
            result,
            "{name} on {threads} threads"
        );
    }
    let t = &result.totals;
    assert_eq!(t.sent, t.delivered + drops + result.in_flight());
}

#[test]
fn examples_match_their_golden_results() {
    let small_tree = [
        ("k = 32", "k = 4"),
        ("hosts_per_edge = 16", "hosts_per_edge = 2"),
        ("flow_count = 8192", "flow_count = 16"),
        ("capacity = 200", "capacity = 20"),
    ];
    check_golden(
        "e5.toml",
        &small_tree,
        (16, 11_760, 108, 0xb185_ddc5_c3ec_2074),
    );
    check_golden(
        "exp.toml",
        &[("duration = 2.0", "duration = 0.2")],
        (0, 27_243, 0, 0x9796_7d4e_88d9_e8f7),
    );
    check_golden(
        "roce-incast.toml",
        &[("4_000_000", "400_000")],
        (15, 5_865, 0, 0x65b5_ba7e_6da3_0646),
    );
    check_golden("pfc-deadlock.toml", &[], (0, 129, 0, 0x73af_2e0a_89f6_1e4d));
    let small_ndp = [
        ("k = 16, hosts_per_edge = 8", "k = 4, hosts_per_edge = 2"),
        ("size = 2_000_000", "size = 500_000"),
    ];
    check_golden(
        "ndp-permutation.toml",
        &small_ndp,
        (16, 1_968, 0, 0x4fbc_6c97_d8b1_d8c8),
    );
    check_golden(
        "failures.toml",
        &[],
        (16, 22_272, 442, 0x4277_3b9d_9e1f_b2ae),
    );
    check_golden(
        "bbr.toml",
        &[("duration = 10.0", "duration = 1.0")],
        (0, 17_011, 106, 0x87e2_4610_023e_ca6a),
    );
    check_golden(
        "web-search.toml",
        &[("span = 0.02", "span = 0.001")],
        (27, 36_414, 0, 0xae47_ef11_9a88_a45c),
    );
    check_golden(
        "collectives.toml",
        &[],
        (206, 67_918, 0, 0xb12d_d17d_c15c_8064),
    );
    check_golden(
        "days-dialect.toml",
        &[],
        (119, 14_410, 0, 0x010b_f8e8_0a61_5755),
    );
    check_golden("paths.toml", &[], (3, 10_281, 6, 0xb4ed_bf6c_b7ab_b9c1));
    check_golden("classes.toml", &[], (3, 6_592, 156, 0x6608_e18a_0cd5_87b6));
    check_golden(
        "dragonfly.toml",
        &[],
        (72, 9_202, 65, 0x4727_27ab_78a5_cb5e),
    );
}
