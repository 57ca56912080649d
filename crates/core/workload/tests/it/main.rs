//! The requests of whole workloads: their shared prefixes, and that they never change.

use std::collections::HashSet;
use std::path::PathBuf;

use slipstream_base::BlockHash;
use slipstream_config::doc::Doc;
use slipstream_config::workload_file::{self, Workload};
use slipstream_workload::{Source, Vocabulary};

fn read(text: &str) -> Workload {
    workload_file::read(Doc::parse("w.toml", text.as_bytes()))
        .unwrap()
        .0
}

/// A fingerprint of requests: their text, lengths and times.
fn digest(workload: &Workload) -> u64 {
    let source = Source::open(workload, 0).unwrap();
    let vocabulary = Vocabulary::english();
    let mut hash = BlockHash(0);
    let mut text = String::new();
    for request in source {
        let request = request.unwrap();
        text.clear();
        request.prompt.write_text(&vocabulary, |_| None, &mut text);
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        hash = hash.child(&bytes);
        for number in [
            request.due.0,
            u64::from(request.output_len),
            u64::from(request.turns),
        ] {
            hash = hash.child_of_id(number, 0);
        }
    }
    hash.0
}

const EVERYTHING: &str = r#"
    seed = 11
    requests = 300
    isl = { kind = "lognormal", mean = 900, cv = 0.4, min = 500 }
    osl = { kind = "normal", mean = 100, cv = 0.3, max = 200 }
    [arrival]
    kind = "gamma"
    rate_per_s = 5
    cv = 1.7
    [[prefix]]
    branches = 5
    tokens = 200
    skew = 1
    [[prefix]]
    branches = 3
    tokens = { kind = "uniform", min = 20, max = 90 }
    [session]
    turns = { kind = "choice", values = [1, 4], weights = [2, 1] }
    think_time_s = { kind = "exponential", mean = 3 }
"#;

#[test]
fn the_same_file_and_seed_give_the_same_bytes() {
    // These numbers may change only with a note in the changelog: every saved result that names a
    // workload and a seed depends on them.
    assert_eq!(digest(&read(EVERYTHING)), 1_391_948_906_152_658_113);
    let other_seed = EVERYTHING.replace("seed = 11", "seed = 12");
    assert_ne!(digest(&read(&other_seed)), digest(&read(EVERYTHING)));
}

#[test]
fn the_examples_read() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../examples");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().ends_with(".workload.toml") {
            let text = std::fs::read(&path).unwrap();
            let read = workload_file::read(Doc::parse(&path.to_string_lossy(), &text));
            assert!(read.is_ok(), "{}", read.unwrap_err());
            count += 1;
        }
    }
    assert!(count >= 3, "found {count} examples");
}

/// Path of the Mooncake trace, or `None` with a note.
fn mooncake() -> Option<PathBuf> {
    let folder = std::env::var_os("SLIPSTREAM_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/data"),
        PathBuf::from,
    );
    let path = folder.join("mooncake/conversation_trace.jsonl");
    if path.exists() {
        return Some(path);
    }
    eprintln!(
        "skipped: no {}; set SLIPSTREAM_DATA to the folder that has it",
        path.display()
    );
    None
}

#[test]
fn a_real_trace_keeps_its_lengths_and_its_sharing() {
    let Some(path) = mooncake() else { return };
    let workload = read(&format!(
        "[trace]\nfile = {:?}\n",
        path.display().to_string()
    ));

    // Counted from the file itself, without this crate's code.
    #[derive(serde::Deserialize)]
    struct Line {
        input_length: u32,
        output_length: u32,
        hash_ids: Vec<u64>,
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<Line> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    // A full block of 512 tokens hits if its whole prefix of ids occurred before.
    let (mut seen, mut hits, mut full) = (HashSet::new(), 0, 0);
    for line in &lines {
        let blocks = line.input_length as usize / 512;
        for j in 0..blocks {
            full += 1;
            if !seen.insert(&line.hash_ids[..=j]) {
                hits += 1;
            }
        }
    }

    let (mut cached, mut block_hits, mut blocks, mut count) = (HashSet::new(), 0, 0, 0);
    for (request, line) in Source::open(&workload, 0).unwrap().zip(&lines) {
        let request = request.unwrap();
        assert_eq!(request.prompt.tokens(), line.input_length);
        assert_eq!(request.output_len, line.output_length);
        let prompt = request.prompt.to_blocks(512, BlockHash(1), 0).unwrap();
        for hash in prompt.blocks() {
            blocks += 1;
            block_hits += usize::from(!cached.insert(*hash));
        }
        count += 1;
    }
    assert_eq!(count, lines.len());
    assert_eq!((blocks, block_hits), (full, hits));
}

#[test]
fn texts_of_a_real_trace_share_what_their_ids_share() {
    let Some(path) = mooncake() else { return };
    let toml = format!(
        "requests = 60\n[trace]\nfile = {:?}\n",
        path.display().to_string()
    );
    let requests: Vec<_> = Source::open(&read(&toml), 0)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let vocabulary = Vocabulary::english();
    let words: Vec<Vec<String>> = requests
        .iter()
        .map(|r| {
            let mut text = String::new();
            r.prompt.write_text(&vocabulary, |_| None, &mut text);
            text.split_ascii_whitespace().map(str::to_owned).collect()
        })
        .collect();
    for (i, a) in requests.iter().enumerate() {
        assert_eq!(words[i].len() as u32, a.prompt.tokens());
        for (j, b) in requests.iter().enumerate().skip(i + 1) {
            let shared: u32 = a
                .prompt
                .segments()
                .iter()
                .zip(b.prompt.segments())
                .take_while(|(x, y)| x.content == y.content)
                .map(|(x, y)| x.tokens.min(y.tokens))
                .sum();
            let same = words[i]
                .iter()
                .zip(&words[j])
                .take_while(|(x, y)| x == y)
                .count() as u32;
            // One or two words more may be equal by chance (1 in 381 each).
            assert!(
                (shared..shared + 4).contains(&same),
                "{same} words for {shared} tokens"
            );
        }
    }
}
