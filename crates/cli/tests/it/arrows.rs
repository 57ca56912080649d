//! The arrows between crates, as ARCHITECTURE.md draws them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// By crate: the crates of this workspace that its library depends on.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = BTreeMap::new();
    for folder in std::fs::read_dir(crates).unwrap() {
        let manifest = folder.unwrap().path().join("Cargo.toml");
        let Ok(text) = std::fs::read_to_string(&manifest) else {
            continue;
        };
        let manifest: toml::Table = toml::from_str(&text).unwrap();
        let name = manifest["package"]["name"].as_str().unwrap();
        let of = manifest.get("dependencies").and_then(|d| d.as_table());
        let of = of.into_iter().flatten().map(|(name, _)| name.clone());
        let ours = of.filter_map(|name| Some(name.strip_prefix("slipstream-")?.to_owned()));
        all.insert(
            name.trim_start_matches("slipstream-").to_owned(),
            ours.collect(),
        );
    }
    all
}

/// All direct and indirect dependencies of `name`.
fn closure(of: &BTreeMap<String, BTreeSet<String>>, name: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.pop() {
        for dependency in of.get(&name).into_iter().flatten() {
            if all.insert(dependency.clone()) {
                left.push(dependency.clone());
            }
        }
    }
    all
}

#[test]
fn crates_depend_as_drawn() {
    let of = dependencies();
    assert!(of.len() > 15, "the manifests were found: {of:?}");
    // Each crate, and the crates that it must not depend on, even indirectly.
    let never = [
        (
            "base",
            &["config", "dispatch", "engine", "planes", "router"][..],
        ),
        ("config", &["dispatch", "engine", "planes", "router"]),
        ("discovery", &["config", "kvindex", "kvstore", "planes"]),
        ("kvstore", &["config", "planes"]),
        ("perf", &["engine", "report", "twin", "workload"]),
        (
            "engine",
            &["dispatch", "frontend", "planes", "router", "twin"],
        ),
        ("kvindex", &["planes", "router"]),
        ("router", &["dispatch", "engine", "planes"]),
        (
            "dispatch",
            &["engine", "flows", "frontend", "planes", "twin"],
        ),
        ("flows", &["des", "netsim", "report", "router"]),
        ("planes", &["config", "engine", "frontend", "router"]),
        ("worker", &["frontend", "router", "twin"]),
        (
            "frontend",
            &[
                "bench", "des", "engine", "netsim", "report", "twin", "worker", "workload",
            ],
        ),
        (
            "probe",
            &["dispatch", "engine", "frontend", "kvindex", "router"],
        ),
        ("recorder", &["config", "planes", "report", "workload"]),
        ("bench", &["engine", "frontend", "planes", "worker"]),
        ("twin", &["bench", "frontend", "netsim", "planes", "worker"]),
        ("plan", &["bench", "frontend", "netsim", "planes", "worker"]),
        (
            "study",
            &["bench", "frontend", "kvstore", "netsim", "planes", "worker"],
        ),
        ("netsim", &["engine", "flows", "router", "workload"]),
        ("workload", &["engine", "planes", "router"]),
        ("report", &["engine", "planes", "router", "workload"]),
    ];
    for (name, forbidden) in never {
        assert!(of.contains_key(name), "there is a crate `{name}`");
        let reached = closure(&of, name);
        for other in forbidden {
            assert!(
                !reached.contains(*other),
                "{name} must not depend on {other}"
            );
        }
    }
    for name in of.keys() {
        assert!(
            !closure(&of, name).contains("cli"),
            "{name} depends on the binary"
        );
    }
}
