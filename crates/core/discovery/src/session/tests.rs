//! Sessions over a folder, and over a backend that a test controls.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Condvar, Mutex};

use serde::Deserialize;

use super::*;
use crate::{Folder, FolderOptions};

const LONG: Duration = Duration::from_secs(30);
const LEASE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seat {
    id: u32,
    address: String,
}

impl Record for Seat {
    fn key(&self) -> String {
        format!("seat-{}", self.id)
    }

    fn check(&self) -> Result<(), String> {
        if self.address.is_empty() {
            return Err("`address` is empty".into());
        }
        Ok(())
    }
}

fn seat(id: u32, address: &str) -> Seat {
    Seat {
        id,
        address: address.into(),
    }
}

fn brief(event: SessionEvent<Seat>) -> String {
    match event {
        SessionEvent::Appeared(seat) => format!("+{} {}", seat.id, seat.address),
        SessionEvent::Vanished(seat) => format!("-{} {}", seat.id, seat.address),
        SessionEvent::Invalid { reason, .. } => format!("invalid: {reason}"),
        SessionEvent::Synced => "synced".into(),
        SessionEvent::Failed(error) => format!("failed: {}", error.operation),
        SessionEvent::Recovered => "recovered".into(),
    }
}

fn start(
    backend: impl Backend + 'static,
    publish: Option<(Seat, Duration)>,
) -> Result<(Session, Receiver<String>), SessionError> {
    let (sender, events) = channel();
    let session = Session::start("test", backend, publish, move |event| {
        let _ = sender.send(brief(event));
    })?;
    Ok((session, events))
}

fn folder(path: &std::path::Path) -> Folder {
    Folder::new(FolderOptions::new(path)).unwrap()
}

#[track_caller]
fn expect(events: &Receiver<String>, wanted: &[&str]) {
    for wanted in wanted {
        assert_eq!(events.recv_timeout(LONG).unwrap(), *wanted);
    }
}

#[test]
fn sessions_find_each_other_in_a_folder_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("not/yet/there");
    let (_watcher, events) = start(folder(&path), None).unwrap();
    expect(&events, &["synced"]);
    let (a, of_a) = start(folder(&path), Some((seat(1, "x"), LEASE))).unwrap();
    expect(&of_a, &["+1 x", "synced"]);
    expect(&events, &["+1 x"]);
    let (b, _) = start(folder(&path), Some((seat(2, "y"), LEASE))).unwrap();
    expect(&of_a, &["+2 y"]);
    expect(&events, &["+2 y"]);
    drop(a);
    expect(&events, &["-1 x"]);
    drop(b);
    expect(&events, &["-2 y"]);
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn a_session_that_cannot_publish_fails_at_its_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let options = FolderOptions {
        hint: "use another --folder",
        ..FolderOptions::new(&file)
    };
    let backend = Folder::new(options).unwrap();
    let error = start(backend, Some((seat(1, "x"), LEASE))).err().unwrap();
    let text = error.to_string();
    assert!(
        text.contains("creating failed") && text.ends_with("use another --folder"),
        "{text}"
    );
}

/// A lease service in memory; polls can be stopped.
#[derive(Clone, Default)]
struct Service(Arc<(Mutex<ServiceState>, Condvar)>);

#[derive(Default)]
struct ServiceState {
    changes: Vec<Change>,
    renewals: u32,
    is_stalled: bool,
    is_in_poll: bool,
    is_failing: bool,
    deleted: Vec<String>,
}

impl Service {
    fn set(&self, change: impl FnOnce(&mut ServiceState)) {
        change(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
    }

    fn put(&self, key: &str, value: &str) {
        self.set(|state| {
            state.changes.push(Change::Put {
                key: key.into(),
                value: value.into(),
            });
        });
    }
}

impl Backend for Service {
    fn put(&mut self, _: SimTime, key: &str, value: &str, _: Duration) -> Result<(), BackendError> {
        Service::put(self, key, value);
        Ok(())
    }

    fn renew(&mut self, _: SimTime, _: &str) -> Result<(), BackendError> {
        self.set(|state| state.renewals += 1);
        Ok(())
    }

    fn delete(&mut self, key: &str) -> Result<(), BackendError> {
        self.set(|state| state.deleted.push(key.into()));
        Ok(())
    }

    fn poll(&mut self, _: SimTime, changes: &mut Vec<Change>) -> Result<SimTime, BackendError> {
        let state = self.0.0.lock().unwrap();
        let waits = |state: &mut ServiceState| {
            state.is_in_poll = true;
            self.0.1.notify_all();
            state.is_stalled
        };
        let mut state = self.0.1.wait_while(state, waits).unwrap();
        state.is_in_poll = false;
        if state.is_failing {
            return Err(BackendError {
                place: "discovery folder /f".into(),
                operation: "testing",
                hint: "",
                source: io::ErrorKind::TimedOut.into(),
            });
        }
        changes.append(&mut state.changes);
        Ok(SimTime::MAX)
    }

    fn wait(&mut self, timeout: Duration) {
        let state = self.0.0.lock().unwrap();
        // Returns early: these tests do not cover how a service waits.
        let timeout = timeout.min(Duration::from_millis(5));
        drop(self.0.1.wait_timeout(state, timeout).unwrap());
    }

    fn waker(&self) -> Waker {
        let service = self.clone();
        Arc::new(move || service.0.1.notify_all())
    }
}

#[test]
fn a_backend_that_never_returns_keeps_nobody_from_ending() {
    let service = Service::default();
    let (session, events) = start(service.clone(), Some((seat(1, "x"), LEASE))).unwrap();
    expect(&events, &["+1 x", "synced"]);
    service.set(|state| state.is_stalled = true);
    let state = service.0.0.lock().unwrap();
    let waits = |state: &mut ServiceState| !state.is_in_poll;
    drop(service.0.1.wait_while(state, waits).unwrap());
    drop(session); // waits for a bounded time
    assert!(
        service.0.0.lock().unwrap().deleted.is_empty(),
        "it was stalled"
    );
    service.set(|state| state.is_stalled = false);
    // The thread continues and removes the record.
    let state = service.0.0.lock().unwrap();
    let waits = |state: &mut ServiceState| state.deleted.is_empty();
    let (state, _) = service.0.1.wait_timeout_while(state, LONG, waits).unwrap();
    assert_eq!(state.deleted, ["seat-1"]);
}

#[test]
fn records_are_checked_and_replaced_and_renewed() {
    let service = Service::default();
    let lease = Duration::from_millis(30);
    let (_session, events) = start(service.clone(), Some((seat(1, "x"), lease))).unwrap();
    expect(&events, &["+1 x", "synced"]);
    service.put("seat-2", r#"{"id":2,"address":"y"}"#);
    expect(&events, &["+2 y"]);
    service.put("seat-2", r#"{"id":2,"address":"y"}"#); // the same
    service.put("seat-2", r#"{"id":2,"address":"z"}"#);
    expect(&events, &["-2 y", "+2 z"]);
    service.put("seat-2", r#"{"id":3,"address":"z"}"#);
    expect(&events, &["invalid: the key of this record is seat-3"]);
    service.put("seat-2", r#"{"id":2,"address":""}"#);
    expect(&events, &["invalid: `address` is empty"]);
    service.set(|state| state.is_failing = true);
    expect(&events, &["failed: testing"]);
    service.set(|state| state.is_failing = false);
    expect(&events, &["recovered"]);
    service.set(|state| {
        state.changes.push(Change::Deleted {
            key: "seat-2".into(),
        });
    });
    expect(&events, &["-2 z"]); // the last valid one
    let state = service.0.0.lock().unwrap();
    let waits = |state: &mut ServiceState| state.renewals < 3;
    let (state, _) = service.0.1.wait_timeout_while(state, LONG, waits).unwrap();
    assert!(state.renewals >= 3);
}
