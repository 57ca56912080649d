use std::io::Write;
use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;

/// A folder with one path of each kind.
struct Kinds(tempfile::TempDir);

impl Kinds {
    fn new() -> Kinds {
        let kinds = Kinds(tempfile::tempdir().unwrap());
        std::fs::write(kinds.at("key"), "secret").unwrap();
        symlink(kinds.at("key"), kinds.at("link")).unwrap();
        symlink("/dev/zero", kinds.at("zero")).unwrap();
        symlink(kinds.at("loop"), kinds.at("loop")).unwrap();
        kinds.fifo("fifo");
        kinds
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn fifo(&self, name: &str) -> PathBuf {
        let (at, mode) = (self.at(name), Mode::RUSR | Mode::WUSR);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &at, kind, mode, 0).unwrap();
        at
    }
}

#[test]
fn a_running_process_reads_regular_files_of_limited_size_and_refuses_the_rest_at_once() {
    let kinds = Kinds::new();
    let socket = std::os::unix::net::UnixListener::bind(kinds.at("socket")).unwrap();
    assert_eq!(reread(&kinds.at("key"), 6).unwrap(), b"secret");
    assert_eq!(reread(&kinds.at("link"), 6).unwrap(), b"secret");
    let error = reread(&kinds.at("key"), 5).unwrap_err().to_string();
    assert!(error.contains("larger than 5 bytes"), "{error}");
    for name in ["zero", "socket", "loop", "none", "."] {
        let error = reread(&kinds.at(name), 6).unwrap_err();
        assert_ne!(error.kind(), io::ErrorKind::TimedOut, "{name}: {error}");
    }
    drop(socket);
    // Regular files of size 0, as /proc has them.
    let status = reread_text(Path::new("/proc/self/status"), 1 << 20).unwrap();
    assert!(status.starts_with("Name:"));
}

#[test]
fn a_fifo_is_read_to_its_writers_end_at_the_start_and_later() {
    let kinds = Kinds::new();
    let path = kinds.at("fifo");
    type Reader = fn(&Path) -> io::Result<Vec<u8>>;
    let readers: [Reader; 3] = [
        read,
        |path| reread(path, 1 << 20),
        |path| reread(path, 1 << 20),
    ];
    for reader in readers {
        // More than a pipe holds: the writer must wait for the reader.
        let content: Vec<u8> = (0..200_000u32).map(|n| n.to_le_bytes()[0]).collect();
        let (to, written) = (path.clone(), content.clone());
        let writer = std::thread::spawn(move || std::fs::write(to, written));
        assert_eq!(reader(&path).unwrap(), content);
        writer.join().unwrap().unwrap();
    }
}

#[test]
fn a_fifo_without_a_writer_is_given_up_and_its_next_content_is_not_lost() {
    let kinds = Kinds::new();
    let path = kinds.at("fifo");
    let error = read_fifo(&path, Duration::from_millis(1), 6).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    assert!(error.to_string().contains("FIFO"), "{error}");
    let to = path.clone();
    let writer = std::thread::spawn(move || std::fs::write(to, "key\n"));
    assert_eq!(reread(&path, 6).unwrap(), b"key\n");
    writer.join().unwrap().unwrap();
    // A writer that does not end, and one that writes too much.
    let mut open = File::options().read(true).write(true).open(&path).unwrap();
    open.write_all(b"key").unwrap();
    let error = read_fifo(&path, Duration::from_millis(1), 6).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    open.write_all(b"1234567").unwrap();
    let error = read_fifo(&path, Duration::from_millis(1), 6).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::FileTooLarge, "{error}");
}

#[test]
fn a_pipe_of_the_shell_is_read_once() {
    let (read_end, mut write_end) = io::pipe().unwrap();
    write_end.write_all(b"secret").unwrap();
    drop(write_end);
    let path = PathBuf::from(format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&read_end)
    ));
    assert!(is_read_once(&path));
    assert_eq!(read(&path).unwrap(), b"secret");
    let error = reread(&path, 6).unwrap_err().to_string();
    assert!(error.contains("only once"), "{error}");
    let kinds = Kinds::new();
    for name in ["key", "fifo", "none"] {
        assert!(!is_read_once(&kinds.at(name)), "{name}");
    }
}

#[test]
fn a_file_that_grows_is_read_up_to_its_limit() {
    struct Growing<'a>(&'a Path, File);
    impl Read for Growing<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            // Another process appends between any two reads.
            let mut file = File::options().append(true).open(self.0)?;
            file.write_all(&[0; 700])?;
            self.1.read(buffer)
        }
    }
    let kinds = Kinds::new();
    let path = kinds.at("key");
    let file = open_regular(&path, OFlags::empty()).unwrap();
    let error = read_at_most(Growing(&path, file), 100_000).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    assert!(error.to_string().contains("100000 bytes"), "{error}");
}

#[test]
fn text_has_no_byte_order_mark() {
    let kinds = Kinds::new();
    let marked = kinds.at("marked");
    let readers: [fn(&Path) -> io::Result<String>; 2] = [read_text, |path| reread_text(path, 9)];
    for reader in readers {
        for (bytes, expected) in [
            ("\u{feff}a", Some("a")),
            ("a\u{feff}", Some("a\u{feff}")),
            ("\u{feff}", Some("")),
            ("", Some("")),
        ] {
            std::fs::write(&marked, bytes).unwrap();
            assert_eq!(reader(&marked).ok().as_deref(), expected, "{bytes:?}");
        }
        std::fs::write(&marked, b"\xff").unwrap();
        assert!(reader(&marked).is_err());
    }
}

#[test]
fn what_does_not_end_is_refused() {
    let max = 1 << 20;
    let error = read_at_most(io::repeat(0), max).unwrap_err();
    assert!(error.to_string().contains("larger than 1 MiB"), "{error}");
    let whole = read_at_most(io::repeat(7).take(max), max).unwrap();
    assert_eq!(whole.len() as u64, max);
    let kinds = Kinds::new();
    for name in [".", "none"] {
        assert!(read(&kinds.at(name)).is_err(), "{name}");
    }
}

#[test]
fn a_read_that_does_not_end_is_left_behind_and_not_repeated() {
    let path = Path::new("/stalled/key");
    let (go, stalled) = mpsc::channel::<()>();
    let (ended, end) = mpsc::channel();
    let stuck = within(path, Duration::ZERO, move |_| {
        let _ = stalled.recv();
        let _ = ended.send(());
        Ok(Vec::new())
    });
    assert_eq!(stuck.unwrap_err().kind(), io::ErrorKind::TimedOut);
    let again = within(path, READ_WITHIN, |_| panic!("a second thread"));
    assert!(again.unwrap_err().to_string().contains("earlier read"));
    // Other files are read.
    assert!(reread(Path::new("/proc/self/status"), 1 << 20).is_ok());
    drop(go);
    end.recv().unwrap();
    while Reading::begin(path).is_err() {
        std::thread::yield_now(); // the thread ends
    }
}

proptest! {
    /// Both readers, of every kind of source: the content as it is, or a refusal because of its size.
    #[test]
    fn both_readers_return_the_content_or_refuse_its_size(
        kind in 0..4usize,
        mark in any::<bool>(),
        rest in prop_oneof![prop::collection::vec(any::<u8>(), 0..200), "\\PC{0,80}".prop_map(String::into_bytes)],
        limit in 0..200u64,
        again in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut content = if mark { "\u{feff}".as_bytes().to_vec() } else { Vec::new() };
        content.extend(&rest);
        let path = match kind {
            0 => at("file"),
            1 => { symlink(at("file"), at("link")).unwrap(); at("link") }
            2 => { symlink(at("link"), at("second")).unwrap(); symlink(at("file"), at("link")).unwrap(); at("second") }
            _ => {
                let mode = Mode::RUSR | Mode::WUSR;
                rustix::fs::mknodat(rustix::fs::CWD, at("file"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
                at("file")
            }
        };
        let (to, written) = (at("file"), content.clone());
        let write = move || std::fs::write(to, written);
        let writer = if kind == 3 {
            Some(std::thread::spawn(write))
        } else {
            write().unwrap();
            None
        };
        let bytes_max = if again { limit } else { BYTES_MAX };
        let found = if again { reread(&path, bytes_max) } else { read(&path) };
        let expected = if content.len() as u64 > bytes_max { Err(io::ErrorKind::FileTooLarge) } else { Ok(content) };
        prop_assert_eq!(found.map_err(|error| error.kind()), expected.clone());
        if let Some(writer) = writer {
            let _ = writer.join().unwrap(); // an error: the reader wants no more
        }
        let of_text = expected.ok().and_then(|bytes| text(bytes).ok());
        let plain = String::from_utf8(rest).ok();
        if let Some(text) = of_text {
            // A mark of the content itself is a mark as well.
            let plain = plain.expect("it is text");
            prop_assert_eq!(text, if mark { plain } else { plain.trim_start_matches('\u{feff}').to_owned() });
        }
    }
}

#[test]
fn a_stream_is_no_fifo() {
    let kinds = Kinds::new();
    let error = open_stream(&kinds.at("fifo")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    assert!(open_stream(&kinds.at("link")).is_ok());
}
