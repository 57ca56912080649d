//! The layers of the crate, as `src/lib.rs` draws them: a file names its own layer, and layers below.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Each layer with those that it may name.
const LAYERS: [(&str, &[&str]); 8] = [
    ("json", &[]),
    ("wire", &[]),
    ("text", &["json"]),
    ("openai", &["json", "text"]),
    ("door", &["json", "wire", "text", "openai"]),
    ("tokens", &["json", "text", "openai", "door"]),
    ("upstream", &["json", "wire", "text", "openai", "door"]),
    ("server", &["text", "openai", "door", "tokens", "upstream"]),
];

/// The Rust files below `folder`.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|of| of == "rs") {
            found.push(path);
        }
    }
}

/// `text` without comments, and without the tests at its end.
fn production(text: &str) -> String {
    // Modules of tests come last.
    let is_tests = |rest: &str| {
        rest.lines()
            .next()
            .is_some_and(|line| line.contains("mod "))
    };
    let mut tests = text.match_indices("#[cfg(test)]\n");
    let end = tests.find(|(at, mark)| is_tests(&text[at + mark.len()..]));
    let text = end.map_or(text, |(at, _)| &text[..at]);
    let lines = text.lines().map(|line| line.split("//").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

/// The layers that `text` of the module `here` names, by `crate::` and by `super::`.
fn named(here: &[&str], text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let word = |text: &str| {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        text[..end.unwrap_or(text.len())].to_owned()
    };
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            // Only heads count: what is in the braces of one of them belongs to it.
            let mut depth = 0;
            for part in list.split_inclusive(['{', '}', ',']) {
                if depth == 0 {
                    found.insert(word(part.trim_start()));
                }
                depth += i32::from(part.ends_with('{')) - i32::from(part.ends_with('}'));
                if depth < 0 {
                    break;
                }
            }
        } else {
            found.insert(word(rest));
        }
    }
    for (at, _) in text.match_indices("super::") {
        if text[..at].ends_with("::") {
            continue; // of the chain before
        }
        let mut rest = &text[at..];
        let mut ups = 0;
        while let Some(after) = rest.strip_prefix("super::") {
            (rest, ups) = (after, ups + 1);
        }
        let inner = text[..at].contains("\nmod ") || text[..at].contains("\npub mod ");
        if ups >= here.len() && !(inner && ups == here.len()) {
            found.insert(word(rest));
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

#[test]
fn files_name_no_higher_layer() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&src, &mut all);
    let (mut checked, mut wrong) = (0, Vec::new());
    for path in &all {
        let parts: Vec<String> = path
            .strip_prefix(&src)
            .unwrap()
            .with_extension("")
            .iter()
            .map(|part| part.to_str().unwrap().to_owned())
            .collect();
        let mut here: Vec<&str> = parts.iter().map(String::as_str).collect();
        here.retain(|part| !matches!(*part, "mod" | "lib"));
        if here
            .iter()
            .any(|part| *part == "tests" || part.ends_with("_test"))
        {
            continue;
        }
        let Some(own) = here.first() else {
            continue; // the root names all
        };
        let Some((_, below)) = LAYERS.iter().find(|(name, _)| name == own) else {
            wrong.push(format!("{}: no layer is called {own}", path.display()));
            continue;
        };
        let text = production(&std::fs::read_to_string(path).unwrap());
        for name in named(&here, &text) {
            checked += 1;
            if name != *own && !below.contains(&&*name) {
                wrong.push(format!("{}: names {name}", path.display()));
            }
        }
    }
    assert!(checked > 100, "the files were read: {checked}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_name_of_a_higher_layer_is_seen() {
    let text = "use crate::door::budget::Budget;\nfn f() { crate::server::run() }\n\
                use crate::{json, tokens::{self, upstream}};\nuse super::super::upstream::Relay;\n\
                use super::own;\n";
    let found = named(&["tokens", "reply"], text);
    let expected = ["door", "json", "server", "tokens", "upstream"];
    assert_eq!(found, expected.map(str::to_owned).into());
}
