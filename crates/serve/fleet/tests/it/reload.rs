//! The cluster file of a running router, and the files of keys that it names.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::{Doc, Settings};
use slipstream_fleet::reload::{ClusterFile, ReadFile};
use slipstream_fleet::{Bound, RouterOptions, RouterServer};

/// Time limit, longer than any operation here.
const PATIENCE: Duration = Duration::from_secs(30);

/// An engine that answers every request with an empty 200. It ends with the process.
fn engine() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4_096]);
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

/// A cluster file with these engines, whose key is in a file.
fn text(engines: &[SocketAddr], key: &Path) -> String {
    let urls: Vec<String> = engines
        .iter()
        .map(|at| format!("\"http://{at}\""))
        .collect();
    format!(
        "[live]\nshards = 1\n[pool.main]\nengines = [{}]\napi_key_file = \"{}\"\n",
        urls.join(", "),
        key.display()
    )
}

fn resolve(text: &str, read: ReadFile<'_>) -> anyhow::Result<(Cluster, Settings)> {
    Ok(file::read(Doc::parse("c.toml", text.as_bytes()), read)?)
}

/// Starts a router by `text`, the content of `path` at an earlier time.
fn start(path: &Path, text: String) -> RouterServer {
    let (cluster, settings) = resolve(&text, &|path| std::fs::read(path)).unwrap();
    let options = RouterOptions {
        file: Some(ClusterFile {
            path: path.into(),
            text,
            settings,
            resolve: Box::new(|text, read| resolve(&text, read)),
        }),
        ..RouterOptions::default()
    };
    RouterServer::start(&cluster, Bound::bind("127.0.0.1:0").unwrap(), options).unwrap()
}

fn engines_of(router: &RouterServer) -> usize {
    let mut stream = TcpStream::connect(router.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = "GET /metrics HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let lines = answer.lines();
    lines
        .filter(|line| line.starts_with("slipstream_engine_up{"))
        .count()
}

fn await_engines(router: &RouterServer, count: usize) {
    let deadline = Instant::now() + PATIENCE;
    while engines_of(router) != count {
        assert!(
            Instant::now() < deadline,
            "{count} engines: {}",
            router.summary()
        );
    }
}

#[test]
fn an_engine_that_is_added_while_a_router_starts_joins_it() {
    let folder = tempfile::tempdir().unwrap();
    let (path, key) = (folder.path().join("c.toml"), folder.path().join("key"));
    std::fs::write(&key, "k-1").unwrap();
    let (first, second) = (engine(), engine());
    // The router starts by the old text, and finds the new one when it begins to watch the file.
    std::fs::write(&path, text(&[first, second], &key)).unwrap();
    let router = start(&path, text(&[first], &key));
    await_engines(&router, 2);
    router.shutdown();
}

fn join(writer: Option<JoinHandle<()>>) {
    if let Some(writer) = writer {
        writer.join().unwrap();
    }
}

/// A pipe as a shell makes it, with a key in it.
fn pipe() -> (std::io::PipeReader, PathBuf) {
    let (read_end, mut write_end) = std::io::pipe().unwrap();
    write_end.write_all(b"k-1\n").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&read_end);
    (read_end, format!("/proc/self/fd/{fd}").into())
}

#[test]
fn engines_join_whatever_kind_of_file_has_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("plain"), "k-1").unwrap();
    std::fs::write(at("marked"), "\u{feff}k-1\r\n").unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(at("fifo"))
        .status();
    assert!(made.unwrap().success());
    let (_read_end, of_shell) = pipe();
    for key in [at("plain"), at("marked"), at("fifo"), of_shell] {
        let path = at("c.toml");
        let (first, second) = (engine(), engine());
        // A FIFO has a writer for each time that it is read.
        let write = || {
            let to = key.clone();
            let write = move || std::fs::write(&to, "k-1").unwrap();
            key.ends_with("fifo").then(|| std::thread::spawn(write))
        };
        let writer = write();
        std::fs::write(&path, text(&[first], &key)).unwrap();
        let router = start(&path, text(&[first], &key));
        join(writer);
        let writer = write();
        std::fs::write(&path, text(&[first, second], &key)).unwrap();
        await_engines(&router, 2);
        router.shutdown();
        join(writer);
    }
}
