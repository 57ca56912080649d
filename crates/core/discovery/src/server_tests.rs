//! Shared by the tests of backends with servers: a server's process, a network that can be cut, and waits
//! for changes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use slipstream_base::SimTime;

use crate::{Backend, Change, Record, Session, SessionEvent};

/// Time limit, longer than any operation here; a test that reaches it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const LONG: Duration = Duration::from_secs(3_600);

/// Whether `program` can be run. If not, prints that the test is skipped, and the Debian package to
/// install.
pub(crate) fn is_installed(program: &str, package: &str) -> bool {
    let version = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if version.is_err() {
        eprintln!("skipped: no {program} (apt-get install {package})");
    }
    version.is_ok()
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A server, which is killed with its value.
pub(crate) struct ServerProcess(Child);

impl ServerProcess {
    /// Starts `command`, and waits until `is_ready`.
    #[track_caller]
    pub(crate) fn start(
        command: &mut Command,
        mut is_ready: impl FnMut() -> bool,
    ) -> ServerProcess {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = ServerProcess(command.spawn().unwrap());
        let begun = Instant::now();
        while !is_ready() {
            let ended = process.0.try_wait().unwrap();
            assert_eq!(ended, None, "{command:?} has ended");
            assert!(begun.elapsed() < PATIENCE, "{command:?} does not start");
            std::thread::yield_now();
        }
        process
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) const PASS: u8 = 0;
/// Connections are closed.
pub(crate) const CUT: u8 = 1;
/// Bytes are lost, and no side learns of it.
pub(crate) const SILENT: u8 = 2;

/// A network between clients and a server, which can be cut.
pub(crate) struct Proxy {
    pub(crate) address: String,
    mode: Arc<AtomicU8>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub(crate) fn start(server: String) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy {
            address: listener.local_addr().unwrap().to_string(),
            mode: Arc::default(),
            streams: Arc::default(),
        };
        let (mode, streams) = (proxy.mode.clone(), proxy.streams.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let Ok(onward) = TcpStream::connect(&server) else {
                    continue;
                };
                // Looked at under the lock, or a cut that begins now would miss this connection.
                let mut known = streams.lock().unwrap();
                if mode.load(SeqCst) == CUT {
                    continue; // closed
                }
                known.extend([&stream, &onward].map(|of| of.try_clone().unwrap()));
                drop(known);
                let back = (onward.try_clone().unwrap(), stream.try_clone().unwrap());
                for (from, to) in [(stream, onward), back] {
                    let mode = mode.clone();
                    std::thread::spawn(move || forward(from, to, &mode));
                }
            }
        });
        proxy
    }

    pub(crate) fn set(&self, mode: u8) {
        self.mode.store(mode, SeqCst);
        if mode == CUT {
            for stream in self.streams.lock().unwrap().drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, mode: &AtomicU8) {
    let mut piece = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut piece) {
        if mode.load(SeqCst) != SILENT && to.write_all(&piece[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

pub(crate) fn now() -> SimTime {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    SimTime::ZERO + ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

fn text(change: Change) -> String {
    match change {
        Change::Put { key, value } => format!("+{key}={value}"),
        Change::Deleted { key } => format!("-{key}"),
        Change::Invalid { name, .. } => format!("!{name}"),
    }
}

/// Polls until `count` changes came. Failures are waited out.
#[track_caller]
pub(crate) fn changes(backend: &mut impl Backend, count: usize) -> Vec<String> {
    let (begun, mut found) = (Instant::now(), Vec::new());
    loop {
        let _ = backend.poll(now(), &mut found);
        if found.len() >= count {
            return found.into_iter().map(text).collect();
        }
        assert!(begun.elapsed() < PATIENCE, "{count} changes in {found:?}");
        backend.wait(Duration::from_millis(100));
    }
}

/// Polls until a poll has succeeded. Returns the changes of all.
#[track_caller]
pub(crate) fn recovered(backend: &mut impl Backend) -> Vec<String> {
    let (begun, mut found) = (Instant::now(), Vec::new());
    while backend.poll(now(), &mut found).is_err() {
        assert!(begun.elapsed() < PATIENCE, "it stays away");
        backend.wait(Duration::from_millis(20));
    }
    found.into_iter().map(text).collect()
}

/// A record of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Seat {
    id: u32,
}

impl Record for Seat {
    fn key(&self) -> String {
        format!("seat-{}", self.id)
    }
}

/// A session that publishes seat `id`, and its events.
pub(crate) fn session(
    backend: impl Backend + 'static,
    id: u32,
    lease: Duration,
) -> (Session, Receiver<SessionEvent<Seat>>) {
    let (sender, events) = channel();
    let session = Session::start("test", backend, Some((Seat { id }, lease)), move |event| {
        drop(sender.send(event));
    });
    (session.unwrap(), events)
}

/// The next event, except for those of a server that is away for a moment.
#[track_caller]
pub(crate) fn next(events: &Receiver<SessionEvent<Seat>>) -> String {
    loop {
        match events.recv_timeout(PATIENCE).expect("an event") {
            SessionEvent::Appeared(seat) => return format!("+{}", seat.id),
            SessionEvent::Vanished(seat) => return format!("-{}", seat.id),
            SessionEvent::Synced => return "synced".into(),
            SessionEvent::Failed(_) | SessionEvent::Recovered => {}
            SessionEvent::Invalid { name, reason } => panic!("{name}: {reason}"),
        }
    }
}
