//! Every fuzz target on its recorded inputs, and on damaged copies of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use slipstream_base::mix::{below, mix64};
use slipstream_fuzzing::{Check, TARGETS};

/// Damaged copies per target. `make fuzz` tries more of them, with coverage.
const COPIES: usize = 2000;

/// As in `scripts/fuzz.sh`.
const BYTES_MAX: usize = 4096;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../fuzz")
        .join(name)
}

/// Names of the entries of a folder, without extension.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    let stem = |entry: fs::DirEntry| {
        entry
            .path()
            .file_stem()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    };
    entries.map(|entry| stem(entry.unwrap())).collect()
}

/// Prints the input at which a check panics.
struct Input<'a> {
    target: &'a str,
    bytes: &'a [u8],
}

impl Drop for Input<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "{} fails at b\"{}\"",
                self.target,
                self.bytes.escape_ascii()
            );
        }
    }
}

fn check(target: &str, check: Check, bytes: &[u8]) {
    let _input = Input { target, bytes };
    check(bytes);
}

/// Text and numbers at the limits of what decoders take.
const SPLICES: [&[u8]; 12] = [
    b"-1",
    b"0",
    b"1e309",
    b"99999999999999999999",
    b"null",
    b"\"",
    b"[",
    b"}",
    b"nan",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\n",
];

/// Numbers from a seed.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 += 1;
        below(mix64(self.0), n)
    }
}

fn damage(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let at = |bytes: &[u8], rng: &mut Rng| rng.below(bytes.len() as u64 + 1) as usize;
    let start = at(bytes, rng);
    let end = (start + rng.below(24) as usize).min(bytes.len());
    match rng.below(6) {
        0 => bytes.truncate(start),
        1 => drop(bytes.drain(start..end)),
        2 => {
            let part = bytes[start..end].to_vec();
            let to = at(bytes, rng);
            bytes.splice(to..to, part);
        }
        3 => {
            let splice = SPLICES[rng.below(SPLICES.len() as u64) as usize];
            bytes.splice(start..start, splice.iter().copied());
        }
        4 if start < bytes.len() => bytes[start] = rng.below(256) as u8,
        _ if start < bytes.len() => bytes[start] ^= 1 << rng.below(8),
        _ => {}
    }
    bytes.truncate(BYTES_MAX);
}

#[test]
fn each_target_has_a_harness_and_inputs() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(targets.len(), TARGETS.len());
    assert_eq!(names(&folder("fuzz_targets")), targets);
    assert_eq!(names(&folder("corpus")), targets);
}

#[test]
fn recorded_inputs_and_damaged_copies_pass() {
    for (name, target) in TARGETS {
        let files = fs::read_dir(folder("corpus").join(name)).unwrap();
        let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        paths.sort();
        let inputs: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
        assert!(!inputs.is_empty(), "{name}");
        for input in &inputs {
            check(name, target, input);
        }
        let mut rng = Rng(7);
        for copy in 0..COPIES {
            let mut input = inputs[copy % inputs.len()].clone();
            for _ in 0..=rng.below(5) {
                damage(&mut input, &mut rng);
            }
            check(name, target, &input);
        }
    }
}
