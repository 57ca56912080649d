//! Runs the commands in the documents, and compares their output with the output shown.
//!
//! A block of shell code behind the line `<!-- run -->` is run by bash, in a folder that the page's blocks share. One
//! behind `<!-- run background: TEXT -->` runs until the end of the page, and the next block begins once its output
//! has a line with TEXT. A block behind `<!-- output -->` states the output of the block before it: its parts between
//! `…` and line ends must appear in this order.
//!
//! Servers listen on a free port in place of 8000.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The address in the documents.
const ADDRESS: &str = "127.0.0.1:8000";

/// A marked block.
#[derive(Debug, PartialEq)]
enum Block {
    Run(String),
    /// Until the end of the page; its output has the text once it is ready.
    Background(String, String),
    Output(String),
}

/// The marked blocks of a page, with the lines at which they begin.
fn blocks(page: &str) -> Vec<(usize, Block)> {
    let mut found = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let Some(marker) = line
            .strip_prefix("<!-- ")
            .and_then(|rest| rest.strip_suffix(" -->"))
        else {
            continue;
        };
        if !(marker == "output" || marker.starts_with("run")) {
            continue;
        }
        let (_, fence) = lines.next().expect("a block follows its marker");
        assert!(
            fence.starts_with("```"),
            "line {}: no block follows",
            at + 1
        );
        let text: Vec<&str> = lines
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| !line.starts_with("```"))
            .collect();
        let text = text.join("\n");
        let block = match (marker, marker.strip_prefix("run background: ")) {
            (_, Some(ready)) => Block::Background(text, ready.to_owned()),
            ("run", _) => Block::Run(text),
            ("output", _) => Block::Output(text),
            _ => panic!("line {}: unknown marker `{marker}`", at + 1),
        };
        found.push((at + 1, block));
    }
    found
}

/// The first part of `shown` that `actual` does not have behind those before it.
fn missing<'a>(shown: &'a str, actual: &str) -> Option<&'a str> {
    let mut rest = actual;
    for part in shown
        .split(['…', '\n'])
        .filter(|part| !part.trim().is_empty())
    {
        match rest.find(part) {
            None => return Some(part),
            Some(at) => rest = &rest[at + part.len()..],
        }
    }
    None
}

/// Processes that end with the page.
struct Background(Vec<Child>);

impl Drop for Background {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn bash(script: &str, folder: &Path) -> Command {
    let binary = Path::new(env!("CARGO_BIN_EXE_slipstream"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(binary.parent().unwrap().to_owned());
    let folders: Vec<PathBuf> = folders.chain(std::env::split_paths(&path)).collect();
    let mut command = Command::new("bash");
    command
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(folder)
        .stdin(Stdio::null())
        .env("PATH", std::env::join_paths(folders).unwrap())
        .env("NO_COLOR", "1")
        .env("SLIPSTREAM_LIVE__LISTEN", "127.0.0.1:0");
    command
}

fn run_page(name: &str, page: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut background = Background(Vec::new());
    let mut address = ADDRESS.to_owned();
    let mut last = String::new();
    for (line, block) in blocks(page) {
        match block {
            Block::Run(script) => {
                let script = script.replace(ADDRESS, &address);
                let output = bash(&script, folder.path()).output().expect("bash starts");
                last = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(
                    output.status.success(),
                    "{name}:{line}: {}\n{script}\n{last}{}",
                    output.status,
                    String::from_utf8_lossy(&output.stderr)
                );
            }
            Block::Background(script, ready) => {
                // `exec`, so that the process that is ended is the command.
                let mut command = bash(&format!("exec {script}"), folder.path());
                let child = command.stdout(Stdio::piped()).spawn().expect("bash starts");
                background.0.push(child);
                let stdout = background.0.last_mut().unwrap().stdout.take().unwrap();
                let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
                let line = lines
                    .find(|text| text.contains(&ready))
                    .unwrap_or_else(|| panic!("{name}:{line}: it ended without `{ready}`"));
                if let Some((_, at)) = line.split_once("http://") {
                    at.trim().clone_into(&mut address);
                }
            }
            Block::Output(shown) => {
                let shown = shown.replace(ADDRESS, &address);
                if let Some(part) = missing(&shown, &last) {
                    panic!("{name}:{line}: the output has no `{part}` there:\n{last}");
                }
            }
        }
    }
}

#[test]
fn documents_show_what_their_commands_print() {
    for tool in ["bash", "curl"] {
        if Command::new(tool).arg("--version").output().is_err() {
            eprintln!("skipped: no {tool}");
            return;
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<PathBuf> = vec![root.join("README.md")];
    let docs = fs::read_dir(root.join("docs")).unwrap();
    pages.extend(docs.map(|entry| entry.unwrap().path()));
    let mut ran = 0;
    for path in pages {
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let page = fs::read_to_string(&path).unwrap();
        ran += blocks(&page).len();
        run_page(&path.file_name().unwrap().to_string_lossy(), &page);
    }
    assert!(ran >= 10, "marked blocks were found: {ran}");
}

#[test]
fn marked_blocks_are_found() {
    let page = "text\n```sh\nno\n```\n<!-- run -->\n```sh\na\nb\n```\n<!-- output -->\n```text\nx … y\n```\n\
                <!-- run background: up -->\n```sh\nc\n```\n<!-- a comment -->\n";
    assert_eq!(
        blocks(page),
        [
            (5, Block::Run("a\nb".into())),
            (10, Block::Output("x … y".into())),
            (14, Block::Background("c".into(), "up".into())),
        ]
    );
}

#[test]
fn output_is_compared_in_order() {
    let check =
        |shown, expected: Option<&str>| assert_eq!(missing(shown, "1 a\n2 b\n3 c\n"), expected);
    check("1 a\n…\n3 c", None);
    check("…a…b…", None);
    check("3 c\n1 a", Some("1 a"));
    check("1 b", Some("1 b"));
}
