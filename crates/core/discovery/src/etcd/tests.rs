//! Against a real `etcd`, where it is installed; and against servers that are none.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;

use super::*;
use crate::Place;
use crate::access::tests::{authority, identities};
use crate::server_tests::{
    CUT, LONG, PASS, PATIENCE, Proxy, SILENT, ServerProcess, changes, free_port, is_installed,
    next, now, recovered, session,
};

/// A server with a folder of its own.
struct Server {
    process: ServerProcess,
    port: u16,
    dir: tempfile::TempDir,
}

impl Server {
    /// `None`, with a message: `etcd` is not installed.
    fn start() -> Option<Server> {
        if !is_installed("etcd", "etcd-server") {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        Some(Server {
            process: run(&dir, port),
            port,
            dir,
        })
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn client(&self) -> Etcd {
        client(&self.address())
    }

    /// Kills it, and starts it anew on the same port; without its data if `forgets`.
    fn restart(&mut self, forgets: bool) {
        self.process.kill();
        if forgets {
            self.dir = tempfile::tempdir().unwrap();
        }
        self.process = run(&self.dir, self.port);
    }
}

/// One that serves at `client`, on a peer port of its own.
fn etcd(data: &Path, client: &str) -> Command {
    let peer = format!("http://127.0.0.1:{}", free_port());
    let mut command = Command::new("etcd");
    command
        .arg("--data-dir")
        .arg(data)
        .args(["--listen-client-urls", client])
        .args(["--advertise-client-urls", client])
        .args(["--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("default={peer}")])
        // Its shortest lease is 1.5 times the timeout.
        .args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
    command
}

fn run(dir: &tempfile::TempDir, port: u16) -> ServerProcess {
    let body = json!({"key": "YQ=="});
    let server = format!("127.0.0.1:{port}");
    let call = Call {
        server: &server,
        tls: None,
        token: None,
    };
    let mut command = etcd(&dir.path().join("data"), &format!("http://{server}"));
    ServerProcess::start(&mut command, || {
        let answer = call.ask("/v3/kv/range", &body, Instant::now() + PATIENCE);
        answer.is_ok()
    })
}

fn client(server: &str) -> Etcd {
    Etcd::new(EtcdOptions::parse(&format!("etcd://{server}/test/x")).unwrap()).unwrap()
}

fn put(etcd: &mut Etcd, key: &str, lease: Duration) {
    etcd.put(now(), key, "{}", lease).unwrap();
}

#[test]
fn entries_are_found_watched_and_end_with_their_lease() {
    let Some(server) = Server::start() else {
        return;
    };
    let (mut one, mut two) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut two, 1), ["+a={}"], "from the list");
    put(&mut one, "b", LONG);
    assert_eq!(changes(&mut two, 1), ["+b={}"], "from the watch");
    one.put(now(), "a", "7", LONG).unwrap();
    assert_eq!(changes(&mut two, 1), ["+a=7"]);
    one.delete("b").unwrap();
    assert_eq!(changes(&mut two, 1), ["-b"]);
    one.delete("b").unwrap(); // as often as one likes
    // A process that is killed renews nothing more.
    put(&mut one, "c", Duration::from_secs(1));
    assert_eq!(changes(&mut two, 2), ["+c={}", "-c"]);
    // Another prefix is another world.
    let options = EtcdOptions::parse(&format!("etcd://{}/test/xy", server.address())).unwrap();
    put(&mut Etcd::new(options).unwrap(), "d", LONG);
    put(&mut one, "e", LONG);
    assert_eq!(changes(&mut two, 1), ["+e={}"]);
}

#[test]
fn an_entry_whose_lease_is_lost_is_put_again() {
    let Some(server) = Server::start() else {
        return;
    };
    let (mut one, mut two) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut one, 1), ["+a={}"]);
    assert_eq!(changes(&mut two, 1), ["+a={}"]);
    // As for a process that stood still for too long.
    let lease = json!({"ID": one.own["a"].id});
    two.call("/v3/lease/revoke", &lease).unwrap();
    assert_eq!(changes(&mut two, 1), ["-a"]);
    one.renew(now(), "a").unwrap();
    assert_eq!(changes(&mut two, 1), ["+a={}"]);
    // Or somebody deletes the key alone.
    assert_eq!(changes(&mut one, 2), ["-a", "+a={}"]);
    let key = json!({"key": one.full("a")});
    two.call("/v3/kv/deleterange", &key).unwrap();
    assert_eq!(changes(&mut one, 1), ["-a"]);
    one.renew(now(), "a").unwrap();
    assert_eq!(changes(&mut two, 2), ["-a", "+a={}"]);
    // A renewal of an entry that is there changes nothing.
    assert_eq!(changes(&mut one, 1), ["+a={}"]);
    one.renew(now(), "a").unwrap();
    put(&mut one, "b", LONG);
    assert_eq!(changes(&mut two, 1), ["+b={}"]);
}

#[test]
fn a_server_that_starts_again_has_what_it_had() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let (mut one, mut two) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut two, 1), ["+a={}"]);
    server.restart(false);
    assert_eq!(recovered(&mut two), [""; 0], "nothing has changed");
    put(&mut one, "b", LONG);
    assert_eq!(changes(&mut two, 1), ["+b={}"]);
    // One that lost its disk: entries are put again by their processes.
    server.restart(true);
    let mut gone = changes(&mut two, 2);
    gone.sort_unstable();
    assert_eq!(gone, ["-a", "-b"]);
    for key in ["a", "b"] {
        one.renew(now(), key).unwrap();
    }
    assert_eq!(changes(&mut two, 2), ["+a={}", "+b={}"]);
}

#[test]
fn changes_during_a_cut_are_seen_after_it() {
    let Some(server) = Server::start() else {
        return;
    };
    for mode in [CUT, SILENT] {
        let proxy = Proxy::start(server.address());
        let (mut near, mut far) = (server.client(), client(&proxy.address));
        put(&mut near, "a", LONG);
        put(&mut near, "b", LONG);
        let mut found = changes(&mut far, 2);
        found.sort_unstable();
        assert_eq!(found, ["+a={}", "+b={}"], "{mode}");
        proxy.set(mode);
        near.delete("a").unwrap();
        put(&mut near, "c", LONG);
        // It finds that out by itself, also if nothing breaks.
        let (begun, mut meanwhile) = (Instant::now(), Vec::new());
        let error = loop {
            match far.poll(now(), &mut meanwhile) {
                Err(error) => break error.to_string(),
                Ok(next) => far.wait(next - now()),
            }
            assert!(begun.elapsed() < PATIENCE, "{mode}: it does not notice");
        };
        assert!(
            error.contains("etcd ") && error.contains("reading failed"),
            "{error}"
        );
        assert!(
            meanwhile.is_empty(),
            "{mode}: entries stay valid: {meanwhile:?}"
        );
        proxy.set(PASS);
        let mut after = recovered(&mut far);
        after.sort_unstable();
        assert_eq!(after, ["+c={}", "-a"], "{mode}");
        near.delete("b").unwrap();
        near.delete("c").unwrap();
    }
}

#[test]
fn a_watch_that_went_silent_alone_is_replaced() {
    let Some(server) = Server::start() else {
        return;
    };
    let (mut one, mut two) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut two, 1), ["+a={}"]);
    // A connection that is open and brings nothing, as behind some middleboxes.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    two.watch.as_mut().unwrap().stream = Stream::Plain(stream);
    one.delete("a").unwrap();
    assert_eq!(changes(&mut two, 1), ["-a"]);
}

#[test]
fn keys_that_are_no_entries_are_reported_once() {
    let Some(server) = Server::start() else {
        return;
    };
    let mut etcd = server.client();
    for (key, value) in [
        ("test/x/a/b", "e30="),
        ("test/x/bytes", "/w=="),
        ("test/xx", "e30="),
    ] {
        let body = json!({"key": STANDARD.encode(key), "value": value});
        etcd.call("/v3/kv/put", &body).unwrap();
    }
    assert_eq!(changes(&mut etcd, 2), ["!test/x/a/b", "!test/x/bytes"]);
    etcd.watch = None; // it lists them again
    let mut more = Vec::new();
    etcd.poll(now(), &mut more).unwrap();
    assert!(more.is_empty(), "{more:?}");
}

#[test]
fn an_entry_that_somebody_replaced_is_put_again() {
    let Some(server) = Server::start() else {
        return;
    };
    let (mut one, mut other) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut one, 1), ["+a={}"]);
    let long = STANDARD.encode(vec![b'x'; VALUE_BYTES_MAX + 1]);
    // No text; too long; another text; the same, but under no lease: it would outlive its process.
    for (value, seen) in [
        ("/w==", "!test/x/a"),
        (&*long, "!test/x/a"),
        ("Nw==", "+a=7"),
        ("e30=", "+a={}"),
    ] {
        let body = json!({"key": one.full("a"), "value": value});
        other.call("/v3/kv/put", &body).unwrap();
        assert_eq!(changes(&mut one, 1), [seen]);
        one.renew(now(), "a").unwrap();
        assert_eq!(changes(&mut one, 1), ["+a={}"]);
        let body = json!({"key": one.full("a")});
        let kept = other.call("/v3/kv/range", &body).unwrap();
        assert_eq!(kept["kvs"][0]["value"], "e30=");
        assert_eq!(kept["kvs"][0]["lease"], one.own["a"].id);
    }
}

#[test]
fn an_entry_that_became_invalid_is_no_reason_to_list_again() {
    let Some(server) = Server::start() else {
        return;
    };
    let (mut one, mut other) = (server.client(), server.client());
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut other, 1), ["+a={}"]);
    let body = json!({"key": one.full("a"), "value": "/w=="});
    one.call("/v3/kv/put", &body).unwrap();
    assert_eq!(changes(&mut other, 1), ["!test/x/a"]);
    for _ in 0..3 {
        other.check().unwrap();
        assert!(other.watch.is_some() && !other.is_suspect);
    }
    // It is one key still: a second one that was missed is noticed.
    put(&mut one, "b", LONG);
    other.check().unwrap();
    assert!(other.is_suspect);
    assert_eq!(changes(&mut other, 1), ["+b={}"]);
    one.call("/v3/kv/deleterange", &json!({"key": one.full("a")}))
        .unwrap();
    assert_eq!(changes(&mut other, 1), ["-a"]);
}

#[test]
fn sessions_find_each_other_through_a_restart() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let lease = Duration::from_secs(1);
    let start = |id| session(server.client(), id, lease);
    let (_one, of_one) = start(1);
    assert_eq!([next(&of_one), next(&of_one)], ["+1", "synced"]);
    let (two, of_two) = start(2);
    assert_eq!(next(&of_one), "+2");
    let mut seen = [next(&of_two), next(&of_two), next(&of_two)];
    seen.sort_unstable();
    assert_eq!(seen, ["+1", "+2", "synced"]);
    // Both lose everything, and are there again without a restart of theirs.
    server.restart(true);
    let mut third = server.client();
    let mut again = changes(&mut third, 2);
    again.sort_unstable();
    assert_eq!(again, ["+seat-1={\"id\":1}", "+seat-2={\"id\":2}"]);
    drop(two);
    assert_eq!(changes(&mut third, 1), ["-seat-2"]);
    // The other one has seen it come and go, perhaps twice.
    while next(&of_one) != "-2" {}
}

#[test]
fn addresses_are_read_with_ports_and_a_prefix() {
    let parse = EtcdOptions::parse;
    let read = |text: &str| parse(text).map(|of| (of.servers.join(" "), of.prefix));
    for (text, servers, prefix) in [
        ("etcd://a", "a:2379", "slipstream/"),
        ("etcd://a:1,b/", "a:1 b:2379", "slipstream/"),
        ("etcd://[::1]:7/x/y/", "[::1]:7", "x/y/"),
        ("etcd://[::1]", "[::1]:2379", "slipstream/"),
    ] {
        assert_eq!(read(text), Ok((servers.into(), prefix.into())), "{text}");
    }
    for text in [
        "http://a",
        "etcd://",
        "etcd://a:0",
        "etcd://a:x",
        "etcd://a,,b",
        "etcd://a b",
        "etcd://a/x y",
        "etcd://a?ca_file=x",
        "etcds://a?user=x",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn answers_that_are_not_etcds_are_errors() {
    for answer in [
        "",
        "nonsense\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n<html></h",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        "HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope",
        "HTTP/1.1 200 OK\r\ncontent-length: 31\r\n\r\n{\"header\":{\"revision\":\"hello\"}}",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut etcd = client(&listener.local_addr().unwrap().to_string());
        std::thread::spawn(move || {
            // A few calls, then it is gone.
            for stream in listener.incoming().take(3).map_while(Result::ok) {
                let mut stream = stream;
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        let mut found = Vec::new();
        assert!(etcd.put(now(), "a", "{}", LONG).is_err(), "{answer:?}");
        assert!(
            etcd.poll(now(), &mut found).is_err() && found.is_empty(),
            "{answer:?}"
        );
    }
}

/// A server of one connection per call; `answer` gets path and body. It ends with its test.
fn scripted(mut answer: impl FnMut(&str, Value) -> (u16, Value) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let (mut request, mut piece) = (Vec::new(), [0; 4096]);
            let (path, body) = loop {
                let read = stream.read(&mut piece).unwrap();
                assert!(read > 0, "a whole request");
                request.extend_from_slice(&piece[..read]);
                let text = String::from_utf8_lossy(&request);
                if let Some((head, body)) = text.split_once("\r\n\r\n")
                    && let Ok(body) = serde_json::from_str(body)
                {
                    break (head.split(' ').nth(1).unwrap().to_owned(), body);
                }
            };
            let (status, answer) = answer(&path, body);
            let answer = answer.to_string();
            let _ = write!(
                stream,
                "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{answer}",
                answer.len()
            );
        }
    });
    address
}

#[test]
fn a_renewal_that_fails_to_publish_is_repeated_by_the_next() {
    let (tell, puts) = channel();
    let (mut granted, mut fails) = (0, [false, true, false].into_iter());
    let address = scripted(move |path, body| match path {
        "/v3/lease/grant" => {
            granted += 1;
            (200, json!({"ID": granted.to_string()}))
        }
        // Every lease has ended but the third.
        "/v3/lease/keepalive" if body["ID"] == "3" => (200, json!({"result": {"TTL": "3600"}})),
        "/v3/lease/keepalive" => (200, json!({"result": {}})),
        "/v3/kv/put" => {
            tell.send(body["lease"].as_str().unwrap().to_owned())
                .unwrap();
            if fails.next().expect("no more puts") {
                (503, json!({"message": "no leader"}))
            } else {
                (200, json!({}))
            }
        }
        _ => (200, json!({})),
    });
    let mut etcd = client(&address.to_string());
    put(&mut etcd, "a", LONG);
    let error = etcd.renew(now(), "a").unwrap_err().to_string();
    assert!(error.contains("publishing failed: status 503"), "{error}");
    etcd.renew(now(), "a").unwrap();
    etcd.renew(now(), "a").unwrap(); // it is there: nothing to put
    assert_eq!(puts.try_iter().collect::<Vec<_>>(), ["1", "2", "3"]);
}

#[test]
fn a_server_that_says_nothing_is_an_error_that_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap(); // it accepts and answers nothing
    let mut etcd = client(&listener.local_addr().unwrap().to_string());
    let error = etcd.put(now(), "a", "{}", LONG).unwrap_err().to_string();
    assert!(error.contains("it does not answer in time"), "{error}");
    let error = etcd.poll(now(), &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("it does not answer in time"), "{error}");
}

#[test]
fn an_address_of_something_else_is_no_folder() {
    for text in ["http://h:2379", "https://h", "ETCD://h", " etcd://h"] {
        let error = Place::parse(text).unwrap_err();
        assert!(error.contains("etcd://HOST:PORT/PREFIX"), "{text}: {error}");
    }
    for text in ["disc", "/tmp/a:b/c", "etcd:/h", "etcd"] {
        assert_eq!(Place::parse(text), Ok(Place::Folder(text.into())));
    }
    assert!(matches!(Place::parse("etcd://h"), Ok(Place::Etcd(_))));
}

/// A server with TLS that wants certificates of its clients, and knows users.
struct Secured {
    server: Server,
    files: tempfile::TempDir,
}

impl Secured {
    /// `None`, with a message: `etcd` is not installed.
    fn start() -> Option<Secured> {
        let mut server = Server::start()?;
        let files = tempfile::tempdir().unwrap();
        identities(files.path());
        std::fs::write(files.path().join("password"), "s3cret\n").unwrap();
        std::fs::write(files.path().join("wrong"), "guess").unwrap();
        server.process.kill();
        let mut secured = Secured { server, files };
        secured.run();
        let mut root = secured.client("");
        for (path, body) in [
            ("user/add", json!({"name": "root", "password": "r"})),
            ("user/add", json!({"name": "app", "password": "s3cret"})),
            ("role/add", json!({"name": "root"})),
            ("role/add", json!({"name": "app"})),
            (
                "role/grant",
                json!({"name": "app", "perm": {"permType": "READWRITE",
                    "key": STANDARD.encode("test/x/"), "range_end": STANDARD.encode("test/x0")}}),
            ),
            ("user/grant", json!({"user": "root", "role": "root"})),
            ("user/grant", json!({"user": "app", "role": "app"})),
            ("enable", json!({})),
        ] {
            root.call(&format!("/v3/auth/{path}"), &body).unwrap();
        }
        Some(secured)
    }

    fn run(&mut self) {
        let client = format!("https://127.0.0.1:{}", self.server.port);
        let file = |name: &str| self.files.path().join(name);
        let mut command = etcd(&file("data"), &client);
        command
            .arg("--client-cert-auth")
            .arg("--cert-file")
            .arg(file("server.pem"))
            .arg("--key-file")
            .arg(file("server.key"))
            .arg("--trusted-ca-file")
            .arg(file("ca.pem"));
        // Users may be known already: then the call is refused, by a server that runs.
        let process = ServerProcess::start(&mut command, || {
            let answer = self
                .client("")
                .call("/v3/kv/range", &json!({"key": "YQ=="}));
            answer.map_or_else(|error| error.to_string().contains("status 403"), |_| true)
        });
        self.server.process = process;
    }

    fn restart(&mut self) {
        self.server.process.kill();
        self.run();
    }

    fn parameter(&self, name: &str, file: &str) -> String {
        format!("&{name}={}", self.files.path().join(file).display())
    }

    /// With the authority and a certificate.
    fn client(&self, more: &str) -> Etcd {
        let more = [
            &self.parameter("cert_file", "client.pem"),
            &*self.parameter("key_file", "client.key"),
            &self.parameter("ca_file", "ca.pem"),
            more,
        ];
        self.client_with("127.0.0.1", &more.concat())
    }

    fn client_with(&self, host: &str, parameters: &str) -> Etcd {
        let parameters = parameters.trim_start_matches('&');
        let text = format!("etcds://{host}:{}/test/x?{parameters}", self.server.port);
        Etcd::new(EtcdOptions::parse(&text).unwrap()).unwrap()
    }
}

#[test]
fn a_server_with_tls_and_users_is_used_as_another_one() {
    let Some(mut server) = Secured::start() else {
        return;
    };
    let user = format!("&user=app{}", server.parameter("password_file", "password"));
    let (mut one, mut other) = (server.client(&user), server.client(&user));
    put(&mut one, "a", LONG);
    assert_eq!(changes(&mut other, 1), ["+a={}"]);
    // By the watch.
    put(&mut one, "b", Duration::from_secs(1));
    assert_eq!(changes(&mut other, 1), ["+b={}"]);
    assert_eq!(changes(&mut other, 1), ["-b"], "its lease ends");
    // A server that starts again knows no token.
    server.restart();
    one.renew(now(), "a").unwrap();
    assert!(recovered(&mut other).is_empty());
    put(&mut one, "c", LONG);
    assert_eq!(changes(&mut other, 1), ["+c={}"]);
    one.delete("a").unwrap();
    assert_eq!(changes(&mut other, 1), ["-a"]);

    let refused = |mut etcd: Etcd, part: &str| {
        let error = etcd.put(now(), "x", "{}", LONG).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(!error.contains("guess"), "{error}");
    };
    let wrong = format!("&user=app{}", server.parameter("password_file", "wrong"));
    refused(server.client(&wrong), "authentication failed");
    refused(server.client(""), "status 4");
    let ca = server.parameter("ca_file", "ca.pem");
    refused(
        server.client_with("127.0.0.1", &ca),
        "`cert_file` and `key_file`",
    );
    refused(
        server.client_with("localhost", &ca),
        "as its certificate does",
    );
    authority(server.files.path(), "other");
    let ca = server.parameter("ca_file", "other.pem");
    refused(
        server.client_with("127.0.0.1", &ca),
        "name its authority as `ca_file`",
    );
    let clear = format!("etcd://127.0.0.1:{}", server.server.port);
    refused(
        Etcd::new(EtcdOptions::parse(&clear).unwrap()).unwrap(),
        "write etcds://",
    );
    // And a server without TLS.
    let plain = Server::start().expect("it is installed");
    let text = format!("etcds://{}?{}", plain.address(), &ca[1..]);
    refused(
        Etcd::new(EtcdOptions::parse(&text).unwrap()).unwrap(),
        "may not speak TLS",
    );
}

#[test]
fn a_token_that_has_ended_is_replaced_once_per_call() {
    let dir = tempfile::tempdir().unwrap();
    let (say, asked) = channel();
    let address = scripted(move |path, _| {
        say.send(path.to_owned()).unwrap();
        match path {
            "/v3/auth/authenticate" => (200, json!({"token": "t.1"})),
            _ => (401, json!({"message": "etcdserver: invalid auth token"})),
        }
    });
    let password = dir.path().join("password");
    std::fs::write(&password, "p").unwrap();
    let mut options = EtcdOptions::parse(&format!("etcd://{address}")).unwrap();
    options.access.user = Some(("u".into(), password.clone()));
    let mut etcd = Etcd::new(options.clone()).unwrap();
    let error = etcd.poll(now(), &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("invalid auth token"), "{error}");
    let asked: Vec<String> = asked.try_iter().collect();
    let (sign_in, range) = ("/v3/auth/authenticate", "/v3/kv/range");
    assert_eq!(asked, [sign_in, range, sign_in, range]);
    std::fs::remove_file(&password).unwrap();
    let error = Etcd::new(options).unwrap_err().to_string();
    assert!(error.contains(password.to_str().unwrap()), "{error}");
}

/// A server that floods a watch costs the memory of a message, and of one parsed message.
#[test]
fn a_watch_that_floods_is_read_in_bounded_pieces() {
    let message = br#"{"result":{"events":[{"kv":{"key":"YQ==","mod_revision":"7"}}]}}"#;
    let lines = [&message[..], b"\n"].concat();
    for (flood, ends) in [
        (vec![b'['; 64], true),
        (b"[1,".repeat(30), true),
        (lines, false),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap().to_string();
        let floods = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let body = flood.repeat((256 << 10) / flood.len());
            let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            let mut sent = peer.write_all(head.as_bytes());
            while sent.is_ok() {
                let chunk = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n"].concat();
                sent = peer.write_all(&chunk); // until the client has gone
            }
        });
        let call = Call {
            server: &server,
            tls: None,
            token: None,
        };
        let end = Instant::now() + PATIENCE;
        let mut watch = Watch::start(&call, &json!({}), end).unwrap();
        let mut read = 0;
        let mut is_open = true;
        while is_open && read < 4 * MESSAGE_BYTES_MAX {
            let (lines, still) = watch.read();
            // Besides: a chunk that was read in part.
            let held = watch.answer.body.len() + watch.answer.raw.len();
            assert!(
                lines.len() + held <= MESSAGE_BYTES_MAX + (64 << 10),
                "{held}"
            );
            read += lines.len();
            is_open = still;
            std::thread::yield_now();
        }
        assert_eq!(is_open, !ends);
        drop(watch);
        floods.join().unwrap();
    }
    let many = b"{\"a\":[".iter().copied().chain(b"1,".repeat(VALUES_MAX));
    let error = parse(&many.collect::<Vec<_>>()).unwrap_err();
    assert!(error.to_string().contains("too many values"), "{error}");
}
