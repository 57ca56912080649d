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
        ("autoscale", &["dispatch", "engine", "router", "twin"]),
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
                "bench", "cpusched", "des", "engine", "netsim", "report", "twin", "worker",
                "workload",
            ],
        ),
        (
            "probe",
            &["dispatch", "engine", "frontend", "kvindex", "router"],
        ),
        ("recorder", &["config", "planes", "report", "workload"]),
        ("bench", &["engine", "frontend", "planes", "worker"]),
        ("twin", &["bench", "frontend", "planes", "worker"]),
        ("plan", &["bench", "frontend", "planes", "worker"]),
        (
            "study",
            &["bench", "frontend", "kvstore", "planes", "worker"],
        ),
        ("netsim", &["engine", "flows", "router", "workload"]),
        ("cpusched", &["config", "engine", "twin"]),
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

/// The text of all Rust files below `folder`.
fn sources(folder: &Path, out: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, out);
        } else if path.extension().is_some_and(|of| of == "rs") {
            out.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_dependency_is_used() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut checked, mut unused) = (0, Vec::new());
    for folder in std::fs::read_dir(crates).unwrap() {
        let folder = folder.unwrap().path();
        let Ok(text) = std::fs::read_to_string(folder.join("Cargo.toml")) else {
            continue;
        };
        let manifest: toml::Table = toml::from_str(&text).unwrap();
        // Tests may use what the library depends on, but not the other way round.
        let mut of_library = String::new();
        sources(&folder.join("src"), &mut of_library);
        let mut all = String::new();
        sources(&folder, &mut all);
        for (table, text) in [("dependencies", &of_library), ("dev-dependencies", &all)] {
            let listed = manifest.get(table).and_then(|table| table.as_table());
            for name in listed.into_iter().flatten().map(|(name, _)| name) {
                checked += 1;
                let word = name.replace('-', "_");
                let is_name = |c: char| c.is_alphanumeric() || c == '_';
                let is_used = text.match_indices(&word).any(|(at, _)| {
                    !text[..at].ends_with(is_name) && !text[at + word.len()..].starts_with(is_name)
                });
                if !is_used {
                    unused.push(format!("{}: {name} of [{table}]", folder.display()));
                }
            }
        }
    }
    assert!(checked > 200, "the manifests were read: {checked}");
    assert!(unused.is_empty(), "remove {unused:#?}");
}
