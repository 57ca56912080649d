//! Digests of weights' files: which changes they detect.

use std::fs;
use std::path::{Path, PathBuf};

use slipstream_base::mix::draw;
use slipstream_kvstore::content::{ContentError, Depth, digest};

/// A safetensors file with a large tensor and a small one.
fn weights(path: &Path, seed: u64) -> Vec<u8> {
    let (large, small) = (5 << 20, 1024);
    let header = format!(
        r#"{{"a":{{"dtype":"BF16","shape":[{}],"data_offsets":[0,{large}]}},"b":{{"dtype":"BF16","shape":[512],"data_offsets":[{large},{}]}}}}"#,
        large / 2,
        large + small,
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..(large + small) as u64 / 8).flat_map(|n| draw(seed, n).to_le_bytes()));
    fs::write(path, &bytes).unwrap();
    bytes
}

fn of(path: &Path, depth: Depth) -> String {
    digest(&[path.to_path_buf()], depth, None).unwrap()
}

#[test]
fn a_full_digest_covers_every_bit_and_samples_cover_every_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = weights(&path, 7);
    let before = [Depth::Full, Depth::Sampled].map(|depth| of(&path, depth));
    assert_ne!(before[0], before[1]);
    let changed = |at: usize, bit: u8| {
        let mut bytes = bytes.clone();
        bytes[at] ^= bit;
        fs::write(&path, bytes).unwrap();
        [Depth::Full, Depth::Sampled]
            .map(|depth| of(&path, depth))
            .iter()
            .zip(&before)
            .map(|(now, before)| now != before)
            .collect::<Vec<_>>()
    };
    // A bit between two samples: only a full digest detects it.
    assert_eq!(changed(600_000, 1), [true, false]);
    // The last bytes of the large tensor, any of the small one, the header.
    assert_eq!(changed(bytes.len() - 1024 - 1, 1), [true, true]);
    assert_eq!(changed(bytes.len() - 500, 1), [true, true]);
    assert_eq!(changed(20, 1), [true, true]);
    // Another seed.
    weights(&path, 8);
    assert_ne!(of(&path, Depth::Sampled), before[1]);
}

#[test]
fn names_order_and_folders_of_files_do_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two, copy] = ["one", "two", "copy"].map(|name| folder.path().join(name));
    weights(&one, 1);
    weights(&two, 2);
    fs::copy(&one, &copy).unwrap();
    for depth in [Depth::Full, Depth::Sampled] {
        let of = |paths: [&PathBuf; 2]| digest(&paths.map(Clone::clone), depth, None).unwrap();
        assert_eq!(of([&one, &two]), of([&two, &copy]));
        assert_ne!(of([&one, &two]), of([&one, &copy]));
    }
}

/// Files of any content have a digest: invalid safetensors files are sampled as bytes.
#[test]
fn files_of_any_kind_have_digests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.bin");
    let mut seen = std::collections::BTreeSet::new();
    let header = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let contents = [
        Vec::new(),
        vec![0; 7],
        vec![0xff; 8],
        header("{}"),
        header("[]"),
        header(r#"{"a":{"data_offsets":[0,99999]}}"#),
        header(r#"{"a":{"data_offsets":[18446744073709551615,18446744073709551615]}}"#),
        header(r#"{"a":{"data_offsets":[5,1]}}"#),
        vec![3; 3 << 20],
    ];
    for content in &contents {
        fs::write(&path, content).unwrap();
        assert!(seen.insert(of(&path, Depth::Full)));
        assert!(seen.insert(of(&path, Depth::Sampled)));
    }
    assert!(matches!(
        digest(&[], Depth::Full, None),
        Err(ContentError::Empty)
    ));
    let absent = folder.path().join("absent");
    let error = digest(std::slice::from_ref(&absent), Depth::Full, None).unwrap_err();
    assert!(error.to_string().contains(absent.to_str().unwrap()));
}

#[test]
fn an_unchanged_file_is_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    // Written long ago: a digest is not cached just after a change, as the next change may have the
    // same timestamp.
    let paths = [PathBuf::from("/bin/sh")];
    let full = digest(&paths, Depth::Full, None).unwrap();
    assert_eq!(digest(&paths, Depth::Full, Some(&cache)).unwrap(), full);
    let entries: Vec<_> = fs::read_dir(&cache)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(digest(&paths, Depth::Full, Some(&cache)).unwrap(), full);
    fs::write(&entries[0], format!("{:032x} /bin/sh\n", 5)).unwrap();
    assert_ne!(
        digest(&paths, Depth::Full, Some(&cache)).unwrap(),
        full,
        "the file was read again"
    );
    fs::write(&entries[0], "torn").unwrap();
    assert_eq!(digest(&paths, Depth::Full, Some(&cache)).unwrap(), full);
    let fresh = folder.path().join("fresh");
    weights(&fresh, 1);
    let before = digest(std::slice::from_ref(&fresh), Depth::Full, Some(&cache)).unwrap();
    weights(&fresh, 2);
    assert_ne!(digest(&[fresh], Depth::Full, Some(&cache)).unwrap(), before);
    // Without a writable folder, it is read each time.
    let nowhere = Path::new("/proc/nowhere");
    assert_eq!(digest(&paths, Depth::Full, Some(nowhere)).unwrap(), full);
}
