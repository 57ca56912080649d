//! Against a real `nats-server`, where it is installed; and against servers that are none.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use super::*;
use crate::Place;
use crate::server_tests::{
    LONG, PASS, PATIENCE, Proxy, SILENT, ServerProcess, changes, free_port, is_installed, next,
    now, recovered, session,
};

/// A server with a folder of its own.
struct Server {
    process: ServerProcess,
    port: u16,
    dir: tempfile::TempDir,
    config: &'static str,
}

impl Server {
    /// `None`, with a message: `nats-server` is not installed.
    fn start() -> Option<Server> {
        Server::with("")
    }

    /// With more lines of its configuration; `DIR` stands for its folder.
    fn with(config: &'static str) -> Option<Server> {
        let dir = tempfile::tempdir().unwrap();
        Server::in_dir(dir, config)
    }

    fn in_dir(dir: tempfile::TempDir, config: &'static str) -> Option<Server> {
        if !is_installed("nats-server", "nats-server") {
            return None;
        }
        let port = free_port();
        let process = run(&dir, port, config);
        Some(Server {
            process,
            port,
            dir,
            config,
        })
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn client(&self) -> Nats {
        client(&self.address())
    }

    /// Kills it, and starts it anew on the same port; without its data if `forgets`.
    fn restart(&mut self, forgets: bool) {
        self.process.kill();
        if forgets {
            self.dir = tempfile::tempdir().unwrap();
        }
        self.process = run(&self.dir, self.port, self.config);
    }
}

fn run(dir: &tempfile::TempDir, port: u16, config: &str) -> ServerProcess {
    let folder = dir.path().display().to_string();
    let config = format!(
        "host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: \"{folder}/data\" }}\n{}\n",
        config.replace("DIR", &folder)
    );
    let file = dir.path().join("nats.conf");
    std::fs::write(&file, config).unwrap();
    ServerProcess::start(Command::new("nats-server").arg("-c").arg(file), || {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    })
}

fn client(server: &str) -> Nats {
    Nats::new(NatsOptions::parse(&format!("nats://{server}/test")).unwrap()).unwrap()
}

/// A server that starts takes requests before its JetStream does.
#[track_caller]
fn put(nats: &mut Nats, key: &str, lease: Duration) {
    let begun = Instant::now();
    while let Err(error) = nats.put(now(), key, "{}", lease) {
        assert!(begun.elapsed() < PATIENCE, "{error}");
        nats.wait(Duration::from_millis(20));
    }
}

#[test]
fn entries_are_found_watched_and_end_with_their_lease() {
    let Some(server) = Server::start() else {
        return;
    };
    let (mut one, mut other) = (server.client(), server.client());
    assert!(recovered(&mut other).is_empty());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut other, 1), ["+a={}"]);
    one.put(now(), "a", "{\"x\":1}", LONG).unwrap();
    assert_eq!(changes(&mut other, 1), ["+a={\"x\":1}"]);
    put(&mut one, "b", Duration::from_millis(300));
    assert_eq!(changes(&mut other, 1), ["+b={}"]);
    // It is not renewed.
    assert_eq!(changes(&mut other, 1), ["-b"]);
    one.renew(now(), "b").unwrap();
    assert_eq!(changes(&mut other, 1), ["+b={}"]);
    one.delete("b").unwrap();
    assert_eq!(changes(&mut other, 1), ["-b"]);
    one.delete("b").unwrap();
    // Another bucket has other entries.
    let options = NatsOptions::parse(&format!("nats://{}/other", server.address())).unwrap();
    let mut apart = Nats::new(options).unwrap();
    assert!(recovered(&mut apart).is_empty());
    // A third one finds the entries, and nothing else.
    let mut third = server.client();
    assert_eq!(recovered(&mut third), ["+a={\"x\":1}"]);
    // Renewals are no changes.
    one.renew(now(), "a").unwrap();
    put(&mut one, "c", LONG);
    assert_eq!(changes(&mut third, 1), ["+c={}"]);
}

#[test]
fn what_a_killed_process_has_left_is_not_found() {
    let Some(server) = Server::start() else {
        return;
    };
    let mut dead = server.client();
    put(&mut dead, "dead", Duration::from_millis(50));
    let mut one = server.client();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(100) {
        put(&mut one, "one", LONG);
    }
    let mut other = server.client();
    assert_eq!(recovered(&mut other), ["+one={}"]);
}

#[test]
fn a_server_that_starts_again_ends_no_entry() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let (mut one, mut other) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut other, 1), ["+a={}"]);
    for forgets in [false, true] {
        server.process.kill();
        let mut found = Vec::new();
        // It is away: the entry stays.
        let begun = Instant::now();
        while other.poll(now(), &mut found).is_ok() {
            assert!(begun.elapsed() < PATIENCE);
            other.wait(Duration::from_millis(20));
        }
        assert!(found.is_empty(), "{found:?}");
        assert!(one.renew(now(), "a").is_err());
        server.process = run(&server.dir, server.port, "");
        if forgets {
            server.restart(true);
        }
        assert!(recovered(&mut other).is_empty());
        put(&mut one, "a", LONG); // as a renewal
        put(&mut one, "b", LONG);
        assert_eq!(changes(&mut other, 1), ["+b={}"], "forgets: {forgets}");
        one.delete("b").unwrap();
        assert_eq!(changes(&mut other, 1), ["-b"]);
    }
}

#[test]
fn a_watch_that_went_silent_is_replaced_and_ends_no_entry() {
    let Some(server) = Server::start() else {
        return;
    };
    let proxy = Proxy::start(server.address());
    let (mut one, mut other) = (server.client(), client(&proxy.address));
    let lease = Duration::from_secs(2);
    put(&mut one, "a", lease);
    put(&mut one, "b", LONG);
    let mut found = changes(&mut other, 2);
    found.sort_unstable();
    assert_eq!(found, ["+a={}", "+b={}"]);
    proxy.set(SILENT);
    put(&mut one, "c", LONG);
    one.delete("b").unwrap();
    let begun = Instant::now();
    let mut found = Vec::new();
    while other.poll(now(), &mut found).is_ok() {
        one.renew(now(), "a").unwrap();
        assert!(begun.elapsed() < PATIENCE, "a dead watch is not noticed");
        other.wait(Duration::from_millis(50));
    }
    // Its lease would have been over by now.
    assert!(found.is_empty(), "{found:?}");
    proxy.set(PASS);
    one.renew(now(), "a").unwrap();
    let mut found = recovered(&mut other);
    found.sort_unstable();
    assert_eq!(found, ["+c={}", "-b"]);
    // Now it ends.
    assert_eq!(changes(&mut other, 1), ["-a"]);
}

#[test]
fn keys_that_are_no_entries_are_reported_once() {
    let Some(server) = Server::start() else {
        return;
    };
    let mut one = server.client();
    put(&mut one, "good", LONG);
    for (key, payload) in [
        ("a.b", "{\"lease_ms\":9,\"value\":\"\"}"),
        ("odd", "nonsense"),
        ("odd", "again"),
        ("long", "{\"lease_ms\":999999999999,\"value\":\"\"}"),
    ] {
        one.publish(key, "", payload.as_bytes()).unwrap();
    }
    let mut other = server.client();
    let mut found = recovered(&mut other);
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "!$KV.test.a.b",
            "!$KV.test.long",
            "!$KV.test.odd",
            "+good={}"
        ]
    );
    one.publish("odd", "", b"and again").unwrap();
    put(&mut one, "odd", LONG);
    assert_eq!(changes(&mut other, 1), ["+odd={}"]);
}

#[test]
fn a_server_with_tls_and_users_is_used_as_another_one() {
    let files = tempfile::tempdir().unwrap();
    crate::access::tests::identities(files.path());
    let config = "authorization { users: [{ user: app, password: \"s3cret\" }] }\n\
        tls { cert_file: \"DIR/server.pem\", key_file: \"DIR/server.key\", ca_file: \"DIR/ca.pem\", verify: true }";
    let file = |name: &str| files.path().join(name).display().to_string();
    let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client.key"));
    let (password, wrong) = (file("password"), file("wrong"));
    std::fs::write(&password, "s3cret\n").unwrap();
    std::fs::write(&wrong, "guess\n").unwrap();
    let Some(server) = Server::in_dir(files, config) else {
        return;
    };
    let at = |scheme: &str, parameters: &str| {
        let text = format!("{scheme}://{}/test{parameters}", server.address());
        Nats::new(NatsOptions::parse(&text).unwrap()).unwrap()
    };
    let certs = format!("?ca_file={ca}&cert_file={cert}&key_file={key}");
    let user = format!("{certs}&user=app&password_file={password}");
    let (mut one, mut other) = (at("tls", &user), at("tls", &user));
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut other, 1), ["+a={}"]);
    put(&mut one, "b", LONG);
    assert_eq!(changes(&mut other, 1), ["+b={}"]);
    for (mut refused, part) in [
        (
            at("tls", &format!("{certs}&user=app&password_file={wrong}")),
            "Authorization",
        ),
        (at("tls", &certs), "Authorization"),
        (
            at("tls", &format!("?ca_file={ca}")),
            "`cert_file` and `key_file`",
        ),
        (at("nats", ""), "write tls://"),
    ] {
        let error = refused.put(now(), "x", "{}", LONG).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains("guess"), "{error}");
    }
    let plain = Server::start().expect("it is installed");
    let text = format!("tls://{}?ca_file={ca}", plain.address());
    let mut refused = Nats::new(NatsOptions::parse(&text).unwrap()).unwrap();
    let error = refused
        .poll(now(), &mut Vec::new())
        .unwrap_err()
        .to_string();
    assert!(error.contains("it has no TLS"), "{error}");
}

#[test]
fn sessions_find_each_other_through_a_restart() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let mut first = server.client();
    put(&mut first, "first", LONG); // JetStream has started
    first.delete("first").unwrap();
    let lease = Duration::from_secs(20);
    let start = |id| session(server.client(), id, lease);
    let (_one, of_one) = start(1);
    let mut seen = [next(&of_one), next(&of_one)];
    seen.sort_unstable();
    assert_eq!(seen, ["+1", "synced"]);
    let (two, of_two) = start(2);
    assert_eq!(next(&of_one), "+2");
    let mut seen = [next(&of_two), next(&of_two), next(&of_two)];
    seen.sort_unstable();
    assert_eq!(seen, ["+1", "+2", "synced"]);
    // Without its data, and without a word to those who knew it.
    server.restart(true);
    let mut third = server.client();
    let mut again = changes(&mut third, 2);
    again.sort_unstable();
    assert_eq!(again, ["+seat-1={\"id\":1}", "+seat-2={\"id\":2}"]);
    drop(two);
    assert_eq!(changes(&mut third, 1), ["-seat-2"]);
    assert_eq!(next(&of_one), "-2");
}

#[test]
fn addresses_are_read_with_ports_and_a_bucket() {
    let parse = NatsOptions::parse;
    let read = |text: &str| parse(text).map(|of| (of.servers.join(" "), of.bucket));
    for (text, servers, bucket) in [
        ("nats://a", "a:4222", "slipstream"),
        ("tls://a:1,b/", "a:1 b:4222", "slipstream"),
        ("nats://[::1]:7/x_y", "[::1]:7", "x_y"),
    ] {
        assert_eq!(read(text), Ok((servers.into(), bucket.into())), "{text}");
    }
    for text in [
        "http://a",
        "nats://",
        "nats://a:0",
        "nats://a/x.y",
        "nats://a/x/y",
        "nats://u:p@a",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
    assert!(matches!(Place::parse("nats://h"), Ok(Place::Nats(_))));
    assert!(matches!(Place::parse("tls://h"), Ok(Place::Nats(_))));
}

#[test]
fn servers_that_are_not_nats_are_errors() {
    for greeting in [
        "",
        "HTTP/1.1 400 Bad Request\r\n\r\n",
        "INFO nonsense\r\n",
        "INFO {}\r\nMSG a 1 99999999999\r\n",
        "INFO {}\r\nHMSG a 1 9 3\r\nabc\r\n",
        "INFO {}\r\n-ERR 'Authorization Violation'\r\n",
        "INFO {\"jetstream\":false}\r\n",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut nats = client(&listener.local_addr().unwrap().to_string());
        std::thread::spawn(move || {
            for stream in listener.incoming().take(2).map_while(Result::ok) {
                let mut stream = stream;
                let _ = stream.write_all(greeting.as_bytes());
                let _ = stream.read(&mut [0; 4096]);
            }
        });
        let mut found = Vec::new();
        assert!(nats.put(now(), "a", "{}", LONG).is_err(), "{greeting:?}");
        assert!(
            nats.poll(now(), &mut found).is_err() && found.is_empty(),
            "{greeting:?}"
        );
    }
    // It accepts, and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut nats = client(&listener.local_addr().unwrap().to_string());
    let error = nats.put(now(), "a", "{}", LONG).unwrap_err().to_string();
    assert!(error.contains("it does not answer in time"), "{error}");
}
