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
        (16, 22_266, 439, 0xf799_6921_8df4_9175),
    );
    check_golden(
        "bbr.toml",
        &[("duration = 10.0", "duration = 1.0")],
        (0, 16_851, 82, 0xe307_38b7_1e7c_4e50),
    );
    check_golden(
        "web-search.toml",
        &[("span = 0.02", "span = 0.001")],
        (27, 36_414, 0, 0x0bf3_fa9c_4cf8_14a6),
    );
    check_golden(
        "collectives.toml",
        &[],
        (206, 67_918, 0, 0xe9c1_0d1b_8092_da3c),
    );
    check_golden(
        "days-dialect.toml",
        &[],
        (119, 14_410, 0, 0x010b_f8e8_0a61_5755),
    );
    check_golden("paths.toml", &[], (3, 10_284, 9, 0xc526_29c9_32f0_189a));
    check_golden("classes.toml", &[], (3, 6_589, 164, 0x8b5c_89bc_8801_8694));
    check_golden(
        "dragonfly.toml",
        &[],
        (72, 9_266, 66, 0x474a_891b_5f3a_391f),
    );
}
