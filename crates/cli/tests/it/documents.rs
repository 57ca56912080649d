//! Checks that references in the documents are valid: files, headings, make targets, scripts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Every document of the project: path and text.
fn documents() -> Vec<(PathBuf, String)> {
    let root = root();
    let mut all = Vec::new();
    let groups = crate::arrows::crates().into_iter();
    let groups = groups.filter_map(|(_, folder)| Some(folder.parent()?.to_owned()));
    let mut folders = BTreeSet::from([root.clone(), root.join("docs"), root.join("examples")]);
    folders.extend(groups);
    for folder in folders {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ext| ext == "md") {
                let text = fs::read_to_string(&path).unwrap();
                all.push((path, text));
            }
        }
    }
    assert!(all.len() > 15, "the documents were found: {}", all.len());
    all
}

/// Lines outside of fenced code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    })
}

/// The anchor of a heading as GitHub makes it.
fn anchor(heading: &str) -> String {
    heading
        .trim()
        .to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (_, line) in prose(text) {
        let Some(heading) = line.strip_prefix('#') else {
            continue;
        };
        let anchor = anchor(heading.trim_start_matches('#'));
        // A second heading of the same words is numbered.
        let repeated = (1..=all.len())
            .map(|n| format!("{anchor}-{n}"))
            .find(|numbered| !all.contains(numbered));
        if !all.insert(anchor) {
            all.extend(repeated);
        }
    }
    all
}

/// Targets of the links `[text](target)` in a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(')')?.0))
        .map(|target| target.split(' ').next().unwrap_or_default())
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    let mut checked = 0;
    for (path, text) in documents() {
        for (number, line) in prose(&text) {
            for link in links(line) {
                if link.contains("://") || link.starts_with("mailto:") {
                    continue;
                }
                checked += 1;
                let (file, wanted) = link.split_once('#').unwrap_or((link, ""));
                let target = if file.is_empty() {
                    path.clone()
                } else {
                    path.parent().unwrap().join(file)
                };
                let found = target.exists()
                    && (wanted.is_empty()
                        || fs::read_to_string(&target)
                            .is_ok_and(|text| anchors(&text).contains(wanted)));
                if !found {
                    broken.push(format!("{}:{number}: {link}", path.display()));
                }
            }
        }
    }
    assert!(checked > 50, "links were found: {checked}");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Words behind `before` in code, such as targets of make.
fn named<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before)
        .skip(1)
        .map(|rest| {
            rest.split(|c: char| !(c.is_ascii_alphanumeric() || "-_./".contains(c)))
                .next()
                .unwrap_or_default()
        })
        .filter(|word| !word.is_empty())
}

#[test]
fn make_targets_and_scripts_exist() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter(|line| !line.starts_with(['\t', '#', ' ', '.']))
        .filter_map(|line| Some(line.split_once(':')?.0))
        .flat_map(str::split_whitespace)
        .collect();
    assert!(targets.contains("demo") && targets.contains("test"));
    let chores = fs::read_to_string(root().join("scripts/run.sh")).unwrap();
    let mut missing = Vec::new();
    let mut checked = 0;
    for (path, text) in documents() {
        for target in named(&text, "`make ") {
            checked += 1;
            if !targets.contains(target) {
                missing.push(format!("{}: make {target}", path.display()));
            }
        }
        for chore in named(&text, "scripts/run.sh ") {
            checked += 1;
            if !chores.contains(&format!("\n{chore}() {{")) {
                missing.push(format!("{}: scripts/run.sh {chore}", path.display()));
            }
        }
        for script in named(&text, "`scripts/").chain(named(&text, "`./scripts/")) {
            checked += 1;
            if !root().join("scripts").join(script).exists() {
                missing.push(format!("{}: scripts/{script}", path.display()));
            }
        }
    }
    assert!(checked > 20, "commands were found: {checked}");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// A dependency that nothing uses costs every user its build.
#[test]
fn each_dependency_is_used() {
    let root = root();
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let manifest: toml::Table = toml::from_str(&manifest).unwrap();
    let of_workspace = manifest["workspace"]["dependencies"].as_table().unwrap();
    let mut taken = BTreeSet::new();
    let mut unused = Vec::new();
    for (_, folder) in crate::arrows::crates() {
        let text = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let manifest: toml::Table = toml::from_str(&text).unwrap();
        let mut code = String::new();
        collect(&folder, &mut code);
        let by_target = manifest.get("target").and_then(|of| of.as_table());
        let of_targets = by_target
            .into_iter()
            .flatten()
            .filter_map(|(_, of)| of.as_table());
        for manifest in std::iter::once(&manifest).chain(of_targets) {
            for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
                let names = manifest.get(section).and_then(|section| section.as_table());
                for name in names.into_iter().flatten().map(|(name, _)| name) {
                    taken.insert(name.clone());
                    let path = name.replace('-', "_");
                    let used = [format!("{path}::"), format!("use {path}")];
                    if !used.iter().any(|used| code.contains(used)) {
                        unused.push(format!("{}: {name} ({section})", folder.display()));
                    }
                }
            }
        }
    }
    let left = of_workspace.keys().filter(|name| !taken.contains(*name));
    unused.extend(left.map(|name| format!("Cargo.toml: {name}")));
    assert!(taken.len() > 40, "the manifests were found");
    assert!(unused.is_empty(), "{}", unused.join("\n"));
}

/// All Rust code of a crate, tests and benches included.
fn collect(folder: &Path, code: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            collect(&path, code);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            code.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}
