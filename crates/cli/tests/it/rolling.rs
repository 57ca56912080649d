//! Processes are replaced one after the other under load, and no request fails.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::planes::{Worker, await_ready, completion, frontend_command};
use crate::server::{Client, FAST, Server, slipstream};

/// Steps of 2 ms.
const CLUSTER: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=2000000",
    "--set=engine.num_gpu_blocks=8192",
    "--set=engine.max_model_len=4096",
    "--set=live.shards=2",
];

const SHARE: &str = "--set=live.reuse_port=true";

/// Clients in closed loops, until they are joined. Each checks every answer.
struct Load {
    over: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Clients that keep their connection, ones that do not, and ones that stream: two of each.
    fn start(address: SocketAddr) -> Load {
        let over: Arc<AtomicBool> = Arc::default();
        let answered: Arc<AtomicU64> = Arc::default();
        let clients = (0..6)
            .map(|n| {
                let (over, answered) = (over.clone(), answered.clone());
                std::thread::spawn(move || run_client(address, n % 3, &over, &answered))
            })
            .collect();
        Load {
            over,
            answered,
            clients,
        }
    }

    /// Waits until each client had some more answers.
    fn await_more(&self) {
        let (start, before) = (Instant::now(), self.answered.load(SeqCst));
        while self.answered.load(SeqCst) < before + 60 {
            assert!(start.elapsed() < Duration::from_secs(30), "clients wait");
            assert!(!self.clients.iter().any(JoinHandle::is_finished));
            std::thread::yield_now();
        }
    }

    fn join(self) -> u64 {
        self.over.store(true, SeqCst);
        for client in self.clients {
            client.join().expect("no request failed");
        }
        self.answered.load(SeqCst)
    }
}

fn run_client(address: SocketAddr, kind: u32, over: &AtomicBool, answered: &AtomicU64) {
    let (keeps, streams) = (kind != 1, kind == 2);
    let (tokens, path) = (if streams { 100 } else { 5 }, "/v1/completions");
    let body = completion("a long way from home", tokens, streams);
    let mut kept: Option<Client> = None;
    while !over.load(SeqCst) {
        // As HTTP clients do: a connection that was closed while it was idle is not used.
        let mut client = kept
            .take()
            .filter(|client| !client.is_stale())
            .unwrap_or_else(|| Client::connect(address));
        let headers: &[&str] = if keeps { &[] } else { &["Connection: close"] };
        let answer = client.send("POST", path, headers, body.as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        if streams {
            let events = answer.events();
            assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
            assert!(!answer.text().contains("\"error\""), "{}", answer.text());
            assert!(events.len() > 10, "{events:?}");
        } else {
            assert_eq!(answer.json()["usage"]["completion_tokens"], tokens);
        }
        answered.fetch_add(1, SeqCst);
        if keeps && answer.header("connection") != Some("close") {
            kept = Some(client);
        }
    }
}

#[test]
fn every_process_is_replaced_under_load_and_no_request_fails() {
    let dir = tempfile::tempdir().unwrap();
    let new_frontend = |address: &str| {
        let listen = format!("--listen={address}");
        Server::spawn_as_it_is(frontend_command(dir.path(), &[CLUSTER], &[SHARE, &listen]))
    };
    let new_worker =
        |index: usize| Worker::start(dir.path(), &[CLUSTER, &[&format!("--index={index}")]]);
    let mut workers: Vec<Worker> = (0..2).map(new_worker).collect();
    let mut front = new_frontend("127.0.0.1:0");
    let address = front.address();
    let load = Load::start(address);
    load.await_more();
    for _ in 0..2 {
        let next = new_frontend(&address.to_string());
        load.await_more();
        assert!(front.terminate().success());
        front = next;
        load.await_more();
        for index in 0..2 {
            assert!(workers.remove(0).terminate().success());
            workers.push(new_worker(index));
            await_ready(&front, 2);
            load.await_more();
        }
    }
    assert!(load.join() > 400);
    assert_eq!(front.metric("slipstream_streams_lost_total"), 0.0);
}

/// `serve` on a socket that a service manager keeps: it is passed as file 3.
fn activated(socket: &TcpListener) -> Server {
    let mut command = Command::new("sh");
    let script = r#"LISTEN_PID=$$ LISTEN_FDS=1 exec "$@" 3<&0 </dev/null"#;
    command.args(["-c", script, "sh"]);
    command
        .arg(slipstream().get_program())
        .arg("serve")
        .args(FAST);
    command.stdin(Stdio::from(OwnedFd::from(socket.try_clone().unwrap())));
    Server::spawn_as_it_is(command)
}

#[test]
fn a_server_on_a_socket_of_the_service_manager_is_restarted_and_no_request_fails() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let mut server = activated(&socket);
    assert_eq!(server.address(), address, "not `live.listen`");
    let load = Load::start(address);
    for _ in 0..3 {
        load.await_more();
        // No process serves for some time: clients wait.
        assert!(server.terminate().success());
        server = activated(&socket);
    }
    load.await_more();
    load.join();
    assert!(server.terminate().success());
}

#[test]
fn sockets_that_no_service_manager_can_have_passed_are_refused() {
    for (variables, named) in [
        (&["LISTEN_FDS=abc"][..], "LISTEN_FDS is \"abc\""),
        (&["LISTEN_FDS="], "LISTEN_FDS is \"\""),
        (&["LISTEN_FDS=-1"], "LISTEN_FDS is \"-1\""),
        (&["LISTEN_FDS=400000000"], "passed 400000000 sockets"),
        (&["LISTEN_FDS=4000000000"], "LISTEN_FDS is \"4000000000\""),
        (&["LISTEN_FDS=1", "LISTEN_PID=me"], "LISTEN_PID is \"me\""),
        (
            &["LISTEN_FDS=1", "LISTEN_FDS_FIRST_FD=x"],
            "LISTEN_FDS_FIRST_FD is \"x\"",
        ),
        // Passed, and not open: of this process, 1,000 files are not.
        (
            &["LISTEN_FDS=1", "LISTEN_FDS_FIRST_FD=1000"],
            "no TCP socket",
        ),
    ] {
        let mut command = Command::new("env");
        command.args(variables).arg(slipstream().get_program());
        command.arg("serve").args(FAST).stdin(Stdio::null());
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{variables:?}: {error}");
        assert!(error.contains(named), "{variables:?}: {error}");
    }
    // Meant for another process: ignored.
    let mut command = Command::new("env");
    command
        .args(["LISTEN_FDS=1", "LISTEN_PID=1"])
        .arg(slipstream().get_program());
    command.arg("serve").args(FAST).arg("--listen=127.0.0.1:0");
    assert!(Server::spawn_as_it_is(command).terminate().success());
}

#[test]
fn an_address_is_shared_only_among_those_that_allow_it() {
    let shares = Server::start(&[FAST, &[SHARE]]);
    let listen = format!("--listen={}", shares.address());
    let run = |more: &[&str]| {
        let mut command = slipstream();
        let command = command.arg("serve").args(FAST).arg(&listen).args(more);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let error = run(&[]);
    assert!(error.contains("cannot listen on"), "{error}");
    drop(shares);
    let alone = Server::start(&[FAST]);
    let listen = format!("--listen={}", alone.address());
    let mut command = slipstream();
    let command = command.arg("serve").args(FAST).args([&listen, SHARE]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("live.reuse_port"), "{error}");
}

#[test]
fn a_connection_that_is_open_is_answered_once_more_while_a_shared_server_shuts_down() {
    let server = Server::start(&[FAST, &[SHARE]]);
    let body = completion("hello", 3, false);
    let path = "/v1/completions";
    let (mut silent, mut used) = (server.connect(), server.connect());
    assert_eq!(used.send("POST", path, &[], body.as_bytes()).status, 200);
    let mut watch = server.connect();
    assert_eq!(watch.send("GET", "/ready", &[], b"").status, 200);
    let ended = std::thread::spawn(move || server.terminate());
    // It closes the connection as it answers; the next ones are of other servers.
    let drained = watch.send("GET", "/ready", &[], b"");
    if drained.status == 200 {
        assert_eq!(drained.header("connection"), None);
    }
    while !watch.is_stale() {
        let answer = watch.send("GET", "/ready", &[], b"");
        if answer.header("connection") == Some("close") {
            assert_eq!(answer.status, 503);
            assert!(answer.text().contains("draining"), "{}", answer.text());
            break;
        }
    }
    for client in [&mut silent, &mut used] {
        let answer = client.send("POST", path, &[], body.as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(client.is_closed());
    }
    assert!(ended.join().unwrap().success());
}

/// The shard whose connections end first keeps its connections to the workers: without them no shard has a worker.
#[test]
fn the_last_connections_of_a_frontend_that_shuts_down_have_workers() {
    let dir = tempfile::tempdir().unwrap();
    let _workers: Vec<Worker> = (0..2)
        .map(|index| Worker::start(dir.path(), &[CLUSTER, &[&format!("--index={index}")]]))
        .collect();
    let command = frontend_command(dir.path(), &[CLUSTER], &[SHARE, "--listen=127.0.0.1:0"]);
    let front = Server::spawn_as_it_is(command);
    let body = completion("hello", 3, false);
    let ask = |client: &mut Client| {
        let answer = client.send("POST", "/v1/completions", &[], body.as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer
    };
    // A new connection goes to the shard with the fewest, so these are at one shard and the other in turns.
    let mut clients: Vec<Client> = (0..64)
        .map(|_| {
            let mut client = front.connect();
            ask(&mut client);
            client
        })
        .collect();
    let mut rest: Vec<Client> = (0..32).map(|at| clients.remove(at)).collect();
    let ended = std::thread::spawn(move || front.terminate());
    drop(clients);
    while ask(&mut rest[0]).header("connection") != Some("close") {}
    for client in &mut rest[1..] {
        assert_eq!(ask(client).header("connection"), Some("close"));
    }
    assert!(ended.join().unwrap().success());
}
