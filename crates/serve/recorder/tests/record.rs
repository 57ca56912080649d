//! Records as they lie in their folder.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::Value;
use slipstream_base::BlockHash;
use slipstream_recorder::{RecordedRequest, Recorder, RecorderOptions, files_of};

/// A prompt of `tokens` in blocks of 16 whose first blocks are `blocks`.
fn request(arrival_ns: u64, tokens: u32, blocks: &[u64]) -> RecordedRequest {
    RecordedRequest {
        arrival_ns,
        input_tokens: tokens,
        output_tokens: 5,
        blocks: blocks.iter().map(|&hash| BlockHash(hash)).collect(),
        ..RecordedRequest::default()
    }
}

fn lines(folder: &Path) -> Vec<Vec<Value>> {
    let read = |path| fs::read_to_string(path).unwrap();
    let parse = |text: String| {
        text.lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect()
    };
    files_of(folder)
        .unwrap()
        .into_iter()
        .map(read)
        .map(parse)
        .collect()
}

#[test]
fn lines_show_shared_prefixes_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    // Made if it is missing.
    let folder = folder.path().join("a/b");
    let ids = || {
        let recorder = Recorder::start(RecorderOptions::new(&folder, 16), 5_000_000).unwrap();
        let handle = recorder.handle();
        handle.record(request(6_000_000, 40, &[100, 200]));
        handle.record(RecordedRequest {
            session: Some(77),
            priority: -2,
            class: Some(Arc::from("a \"class\"")),
            ..request(5_500_000, 40, &[100, 300])
        });
        handle.record(RecordedRequest {
            output_tokens: 0,
            ..request(7_000_000, 40, &[100, 200])
        });
        let counters = handle.clone();
        recorder.close();
        let count = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
        assert_eq!(count(&counters.counters().written), 2);
        assert_eq!(count(&counters.counters().unanswered), 1);
        // After the end.
        handle.record(request(8_000_000, 16, &[100]));
        assert_eq!(count(&counters.counters().dropped), 1);
        let file = lines(&folder).pop().unwrap();
        assert_eq!(file[0]["tokens_per_id"], 16);
        assert_eq!(file.len(), 3);
        let (first, second) = (&file[1], &file[2]);
        assert_eq!(
            (&first["input_length"], &first["output_length"]),
            (&40.into(), &5.into())
        );
        let gap = first["timestamp"].as_f64().unwrap() - second["timestamp"].as_f64().unwrap();
        assert!((gap - 0.5).abs() < 0.01, "{gap}");
        assert_eq!(
            (&second["priority"], &second["class"]),
            (&(-2).into(), &"a \"class\"".into())
        );
        assert!(first.get("session_id").is_none() && first.get("priority").is_none());
        let ids = |line: &Value| line["hash_ids"].as_array().unwrap().clone();
        let (a, b) = (ids(first), ids(second));
        assert_eq!((a.len(), b.len()), (3, 3));
        assert_eq!(a[0], b[0]);
        // Neither the other block nor the rest is shared.
        assert!(a[1] != b[1] && a[2] != b[2]);
        assert_ne!(second["session_id"], 77);
        a[0].as_u64().unwrap()
    };
    // No hash is as it was, and none is the same in the next run.
    let (one, two) = (ids(), ids());
    assert!(one != two && one != 100);
    assert_eq!(lines(&folder).len(), 2);
}

#[test]
fn files_end_and_the_oldest_are_deleted() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("requests-notes.jsonl"), "mine").unwrap();
    fs::write(
        folder.path().join("requests-000000000000001.jsonl"),
        "x".repeat(4_000),
    )
    .unwrap();
    let options = RecorderOptions {
        file_bytes_max: 1_000,
        total_bytes_max: 4_000,
        ..RecorderOptions::new(folder.path(), 16)
    };
    let recorder = Recorder::start(options, 0).unwrap();
    let handle = recorder.handle();
    for n in 0..200 {
        handle.record(request(n, 32, &[n, n + 1]));
    }
    recorder.close();
    assert_eq!(handle.counters().written.load(Ordering::Relaxed), 200);
    let files = lines(folder.path());
    let sizes = files_of(folder.path()).unwrap();
    let sizes: Vec<u64> = sizes
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .collect();
    assert!(sizes.iter().all(|&bytes| bytes <= 1_000), "{sizes:?}");
    assert!(
        sizes.iter().sum::<u64>() <= 4_000 && sizes.len() >= 3,
        "{sizes:?}"
    );
    assert!(handle.counters().deleted_files.load(Ordering::Relaxed) > 10);
    // The remaining files are the end of the record, without a hole.
    let arrivals = files.iter().flat_map(|file| &file[1..]).count() as u64;
    let last = &files.last().unwrap().last().unwrap()["timestamp"];
    let first = &files[0][1]["timestamp"];
    let span = last.as_f64().unwrap() - first.as_f64().unwrap();
    assert!(arrivals < 200 && span < 1.0, "{span}");
    // Files of others stay.
    assert!(folder.path().join("requests-notes.jsonl").exists());
}

#[test]
fn a_full_queue_drops_and_counts() {
    let folder = tempfile::tempdir().unwrap();
    let options = RecorderOptions {
        queue_max: 1,
        ..RecorderOptions::new(folder.path(), 16)
    };
    let recorder = Recorder::start(options, 0).unwrap();
    let handle = recorder.handle();
    for n in 0..20_000 {
        handle.record(request(n, 320, &[1; 20]));
    }
    recorder.close();
    let count = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
    let (written, dropped) = (
        count(&handle.counters().written),
        count(&handle.counters().dropped),
    );
    assert_eq!(written + dropped, 20_000);
    assert_eq!(lines(folder.path()).concat().len() as u64, written + 1);
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Recorder::start(RecorderOptions::new(&file, 16), 0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("file"), "{error}");
}
