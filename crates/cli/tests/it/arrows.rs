//! The arrows between crates, as ARCHITECTURE.md draws them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The root of the checkout.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folders of all crates, with the group of each: `cli` and `pybind` are in none.
pub(crate) fn crates() -> Vec<(Option<String>, PathBuf)> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let is_crate = |folder: &Path| folder.join("Cargo.toml").exists();
    let mut all = Vec::new();
    for folder in list(&root().join("crates")) {
        if is_crate(&folder) {
            all.push((None, folder));
        } else if folder.is_dir() {
            let group = folder.file_name().unwrap().to_str().unwrap().to_owned();
            let inside = list(&folder).into_iter().filter(|folder| is_crate(folder));
            all.extend(inside.map(|folder| (Some(group.clone()), folder)));
        }
    }
    all
}

/// The crate's manifest.
fn manifest(folder: &Path) -> toml::Table {
    let text = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    toml::from_str(&text).unwrap()
}

/// By crate: the crates of this project that its library depends on.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let of = |folder: &Path| {
        let manifest = manifest(folder);
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let of = manifest.get("dependencies").and_then(|d| d.as_table());
        let of = of.into_iter().flatten().map(|(name, _)| name.clone());
        let ours = of.filter_map(|name| Some(name.strip_prefix("slipstream-")?.to_owned()));
        (name, ours.collect())
    };
    crates().iter().map(|(_, folder)| of(folder)).collect()
}

/// The rows of the table in ARCHITECTURE.md whose head is `head`: names in the first column, and in the last.
fn table(head: &str) -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let names = |cell: &str| -> BTreeSet<String> {
        let parts = cell.split('`').skip(1).step_by(2);
        parts.map(str::to_owned).collect()
    };
    let (_, rows) = text.split_once(head).expect("the table is there");
    let rows = rows.trim_start().lines().skip(1);
    rows.take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
            let name = names(cells[0]).into_iter().next().expect("a name");
            (name, names(cells.last().expect("a cell")))
        })
        .collect()
}

#[test]
fn crates_depend_as_drawn() {
    let of = dependencies();
    assert!(of.len() > 30, "the manifests were found: {of:?}");
    assert_eq!(
        of,
        table("| crate | depends on |"),
        "left: the manifests; right: the table in ARCHITECTURE.md"
    );
}

#[test]
fn groups_depend_as_drawn() {
    let (of, drawn) = (
        dependencies(),
        table("| group | what it is | may depend on |"),
    );
    let group_of: BTreeMap<String, String> = crates()
        .into_iter()
        .map(|(group, folder)| {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            (name.clone(), group.unwrap_or(name))
        })
        .collect();
    for (name, group) in &group_of {
        for other in &of[name] {
            let target = &group_of[other];
            assert!(
                target == group || drawn[group].contains(target),
                "{name} depends on {other}, but the group {group} must not depend on {target}"
            );
        }
    }
    // Each group comes after those that it depends on: no circles.
    let mut left = drawn.clone();
    while !left.is_empty() {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, on| !on.is_disjoint(&names));
        assert!(left.len() < before, "these groups are a circle: {left:?}");
    }
}

#[test]
fn a_group_names_its_crates() {
    let mut checked = 0;
    for (group, folder) in crates() {
        let Some(group) = group else { continue };
        let page = root().join("crates").join(&group).join("README.md");
        let text = std::fs::read_to_string(&page).unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap();
        assert!(
            text.contains(&format!("`{name}`")) && text.contains(&format!("slipstream-{name}")),
            "crates/{group}/README.md does not describe `{name}`, or not how its tests are run"
        );
        checked += 1;
    }
    assert!(checked > 25, "the groups were found: {checked}");
}

#[test]
fn no_crate_builds_from_the_folder_of_one_that_depends_on_it() {
    let of = dependencies();
    let folders: BTreeMap<String, PathBuf> = crates()
        .into_iter()
        .map(|(_, folder)| {
            (
                folder.file_name().unwrap().to_str().unwrap().to_owned(),
                folder,
            )
        })
        .collect();
    let mut checked = 0;
    for (name, folder) in &folders {
        let mut text = String::new();
        sources(folder, &mut text);
        for (other, _) in folders.iter().filter(|(other, _)| *other != name) {
            if text.contains(&format!("../{other}/")) {
                checked += 1;
                assert!(of[name].contains(other), "{name} reads files of {other}");
            }
        }
    }
    assert!(checked > 0, "scx includes headers of cpusched");
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
    let (mut checked, mut unused) = (0, Vec::new());
    for (_, folder) in crates() {
        let manifest = manifest(&folder);
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
