//! `slipstream-kvbench`: that it measures; the figures are not asserted.

use std::process::Command;

#[test]
fn it_measures_transfers_between_two_processes() {
    let output = Command::new(env!("CARGO_BIN_EXE_slipstream-kvbench"))
        .args(["--part", "transfers,tiers", "--scale", "0.001", "--json"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code();
    // Targets are informative: a missed one is not a failure.
    assert_eq!(code, Some(0), "{errors}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = json["rows"].as_array().unwrap();
    let missed = rows.iter().filter(|row| row["met"] == false).count();
    assert_eq!(json["marks_missed"], missed);
    let others = json["others_cpu_share"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&others), "{others}");
    assert_eq!(json["busy_host"], others > 0.1);
    for what in [
        "shared memory, 1 MiB",
        "TCP, 1 MiB",
        "one block of 4 KiB",
        "disk, synced",
    ] {
        let found = rows
            .iter()
            .find(|row| row["what"].as_str().unwrap().contains(what));
        let value = found.unwrap_or_else(|| panic!("{what} in {json:#}"))["value"].as_f64();
        assert!(value.unwrap() > 0.0, "{what}");
    }
}

#[test]
fn a_scale_that_is_none_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_slipstream-kvbench"))
        .args(["--scale", "0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("--scale is 0; use a number above 0"),
        "{text}"
    );
}
