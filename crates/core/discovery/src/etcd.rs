//! Entries as keys of etcd (v3), each under a lease of its own.
//!
//! ```text
//!   PREFIX/KEY = VALUE, under a lease of etcd's that is granted with it and kept alive by renewals
//! ```
//!
//! etcd judges the leases: the key of a process that was killed goes after its lease, which etcd counts in whole
//! seconds, with a minimum of its own (2 s by default). Changes come by a watch from the revision of a list. A watch may
//! break without a word (a host that is gone), so every [`CHECK_NS`] a small question compares count and latest change
//! of the keys with those that were seen; after two differences all keys are listed again.
//!
//! etcd's JSON gateway is used, HTTP/1.1 over blocking sockets: one thread drives a backend, and a client of etcd's
//! gRPC would bring a second HTTP stack and a runtime for six calls. TLS is `etcds://`; a user's password is exchanged for a
//! token, and again when that has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::ClientConfig;
use serde_json::{Value, json};
use slipstream_base::SimTime;
use slipstream_base::text::foreign;
use slipstream_base::width::{to_i64, to_u32};

use crate::access::{Access, Address, Stream};
use crate::notify::Wakes;
use crate::{Backend, BackendError, Change, VALUE_BYTES_MAX, Waker, is_key};

/// Port of etcd's clients.
const PORT: u16 = 2379;
/// Keys that are followed.
const KEYS_MAX: usize = 4_096;
/// Invalid keys that are kept, so that each is reported once.
const INVALID_MAX: usize = 1_024;
/// Time for one call, at all servers together: a lease of 3 s is renewed each second.
const CALL_TIME: Duration = Duration::from_millis(1_500);
/// Answer of a server.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// One message of a watch. An etcd server takes requests of 1.5 MiB, so a change has at most that and its base64.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Values of a JSON text, by its commas and brackets: a parsed value takes some 30 times its bytes. A key has some ten.
const VALUES_MAX: usize = 32 * (KEYS_MAX + 1);
/// Interval of the questions that find out a watch that is dead.
const CHECK_NS: u64 = 2_000_000_000;

/// Where etcd is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdOptions {
    /// Its servers, `HOST:PORT`, asked in turn until one answers.
    pub servers: Vec<String>,
    /// Precedes the keys; ends with `/`.
    pub prefix: String,
    /// TLS, and this process's proofs.
    pub access: Access,
}

impl EtcdOptions {
    /// Parses `etcd://HOST[:PORT][,HOST[:PORT]…][/PREFIX]`, or the same with `etcds://`, for TLS, and parameters
    /// ([`Access`]). The port is 2379 by default, the prefix `slipstream`.
    ///
    /// # Errors
    /// The fault, as the end of a sentence.
    pub fn parse(text: &str) -> Result<EtcdOptions, String> {
        let (rest, tls) = match (text.strip_prefix("etcd://"), text.strip_prefix("etcds://")) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) => return Err("does not begin with etcd:// or etcds://".into()),
        };
        let Address {
            servers,
            path,
            access,
        } = Address::parse(rest, PORT, tls, "etcds://")?;
        let prefix = if path.is_empty() { "slipstream" } else { path };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
        if !prefix.bytes().all(plain) {
            return Err(
                "has a prefix with other characters than letters, digits, `-`, `_`, `.` and `/`"
                    .into(),
            );
        }
        Ok(EtcdOptions {
            servers,
            prefix: format!("{prefix}/"),
            access,
        })
    }
}

/// Entries as keys of etcd; see the module's documentation.
#[derive(Debug)]
pub struct Etcd {
    options: EtcdOptions,
    tls: Option<Arc<ClientConfig>>,
    /// Shows the servers who this is, if there are users; `None`: not asked for yet, or refused.
    token: Option<String>,
    /// The server that answered last.
    current: usize,
    wakes: Wakes,
    own: BTreeMap<String, Own>,
    /// The revision of each entry's last change.
    entries: BTreeMap<String, i64>,
    invalid: BTreeSet<String>,
    /// The latest change that was seen.
    revision: i64,
    watch: Option<Watch>,
    /// The last question found that the watch had missed something.
    is_suspect: bool,
    next_check: SimTime,
}

#[derive(Debug)]
struct Own {
    value: String,
    lease: Duration,
    /// etcd's number of the lease.
    id: String,
    /// Somebody else deleted or replaced it, or it is under another lease than `id`.
    is_lost: bool,
}

impl Etcd {
    /// Does not connect yet.
    ///
    /// # Errors
    ///
    /// [`BackendError`] if a file cannot be used, or the process has no file descriptor left.
    pub fn new(options: EtcdOptions) -> Result<Etcd, BackendError> {
        let tls = options.access.tls();
        let tls = tls.and_then(|tls| options.access.user().map(|_| tls));
        let tls = tls.map_err(|source| BackendError {
            place: place(&options),
            operation: "reading its files",
            hint: "check the parameters of its address",
            source,
        })?;
        let wakes = Wakes::new().map_err(|source| BackendError {
            place: place(&options),
            operation: "preparing to watch",
            hint: "raise ulimit -n",
            source,
        })?;
        Ok(Etcd {
            options,
            tls,
            token: None,
            current: 0,
            wakes,
            own: BTreeMap::new(),
            entries: BTreeMap::new(),
            invalid: BTreeSet::new(),
            revision: 0,
            watch: None,
            is_suspect: false,
            next_check: SimTime::ZERO,
        })
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> BackendError {
        BackendError {
            place: place(&self.options),
            operation,
            hint: "check that etcd answers there, or name another with --discovery",
            source,
        }
    }

    /// Asks the servers, as its user if there is one.
    fn call(&mut self, path: &str, body: &Value) -> io::Result<Value> {
        let end = Instant::now() + CALL_TIME;
        self.sign_in(end)?;
        match self.call_until(path, body, end) {
            // Tokens end, and with them those of a server that started again.
            Err(error) if self.token.is_some() && is_sign_in(&error) => {
                self.token = None;
                self.sign_in(end)?;
                self.call_until(path, body, end)
            }
            answer => answer,
        }
    }

    fn sign_in(&mut self, end: Instant) -> io::Result<()> {
        if self.token.is_some() {
            return Ok(());
        }
        let Some((name, password)) = self.options.access.user()? else {
            return Ok(());
        };
        let body = json!({"name": name, "password": password});
        let answer = self.call_until("/v3/auth/authenticate", &body, end)?;
        let token = answer["token"].as_str().filter(|token| is_token(token));
        let token = token.ok_or_else(|| odd("has no token"))?;
        self.token = Some(token.to_owned());
        Ok(())
    }

    /// Asks the servers in turn, beginning with the one that answered last.
    fn call_until(&mut self, path: &str, body: &Value, end: Instant) -> io::Result<Value> {
        let count = self.options.servers.len();
        let mut error = io::Error::from(io::ErrorKind::NotFound);
        for step in 0..count {
            let at = (self.current + step) % count;
            // The others get a share of the time, too.
            let share = end.saturating_duration_since(Instant::now()) / to_u32(count - step);
            let call = Call {
                server: &self.options.servers[at],
                tls: self.tls.as_ref(),
                token: self.token.as_deref(),
            };
            match call.ask(path, body, Instant::now() + share) {
                Ok(answer) => {
                    self.current = at;
                    return Ok(answer);
                }
                Err(failed) => error = failed,
            }
        }
        Err(error)
    }

    fn full(&self, key: &str) -> String {
        STANDARD.encode(format!("{}{key}", self.options.prefix))
    }

    /// Fields of a request for all keys.
    fn range(&self) -> Value {
        let mut end = self.options.prefix.clone().into_bytes();
        // It ends with `/`, which has a successor.
        *end.last_mut().expect("a prefix ends with /") += 1;
        json!({
            "key": STANDARD.encode(&self.options.prefix),
            "range_end": STANDARD.encode(&end),
        })
    }

    /// Grants a lease and puts the entry under it.
    fn publish(&mut self, key: &str, value: &str, lease: Duration) -> io::Result<String> {
        let seconds = lease.as_millis().div_ceil(1_000).max(1);
        let granted = self.call("/v3/lease/grant", &json!({"TTL": seconds.to_string()}))?;
        let id = granted["ID"]
            .as_str()
            .ok_or_else(|| odd("grants no lease"))?;
        let body = json!({
            "key": self.full(key),
            "value": STANDARD.encode(value),
            "lease": id,
        });
        self.call("/v3/kv/put", &body)?;
        Ok(id.to_owned())
    }

    /// Lists all keys, and begins to watch from there.
    fn list(&mut self, changes: &mut Vec<Change>) -> io::Result<()> {
        let mut body = self.range();
        body["limit"] = json!((KEYS_MAX + 1).to_string());
        let answer = self.call("/v3/kv/range", &body)?;
        let revision =
            number(&answer["header"]["revision"]).ok_or_else(|| odd("has no revision"))?;
        let mut watched = self.range();
        watched["start_revision"] = json!((revision + 1).to_string());
        let call = Call {
            server: &self.options.servers[self.current],
            tls: self.tls.as_ref(),
            token: self.token.as_deref(),
        };
        let watch = Watch::start(
            &call,
            &json!({"create_request": watched}),
            Instant::now() + CALL_TIME,
        )?;
        let mut found = BTreeSet::new();
        for kv in answer["kvs"].as_array().into_iter().flatten() {
            if let Some(key) = self.put_change(kv, changes) {
                found.insert(key);
            }
        }
        let gone: Vec<String> = self
            .entries
            .keys()
            .filter(|key| !found.contains(*key))
            .cloned()
            .collect();
        for key in gone {
            self.forget(key, changes);
        }
        self.invalid.retain(|key| found.contains(key));
        self.revision = revision;
        self.is_suspect = false;
        self.watch = Some(watch);
        Ok(())
    }

    /// A key that is there. Returns it if it is one of ours.
    fn put_change(&mut self, kv: &Value, changes: &mut Vec<Change>) -> Option<String> {
        let full = STANDARD.decode(kv["key"].as_str()?).ok()?;
        let full = String::from_utf8_lossy(&full).into_owned();
        let key = full.strip_prefix(&self.options.prefix)?.to_owned();
        let revision = number(&kv["mod_revision"]).unwrap_or_default();
        let value = STANDARD.decode(kv["value"].as_str().unwrap_or_default());
        let value = value.ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let fault = if !is_key(&key) {
            Some("its key is not one of an entry".to_owned())
        } else if self.entries.len() >= KEYS_MAX && !self.entries.contains_key(&key) {
            Some(format!("more than {KEYS_MAX} keys are there"))
        } else if value
            .as_ref()
            .is_none_or(|value| value.len() > VALUE_BYTES_MAX)
        {
            Some(format!(
                "its value is not a text of at most {VALUE_BYTES_MAX} bytes"
            ))
        } else {
            None
        };
        if let Some(own) = self.own.get_mut(&key) {
            let is_ours = fault.is_none() && value.as_ref() == Some(&own.value);
            own.is_lost = !is_ours || number(&kv["lease"]) != number(&json!(own.id));
        }
        if let Some(reason) = fault {
            if self.invalid.len() < INVALID_MAX && self.invalid.insert(key.clone()) {
                changes.push(Change::Invalid { name: full, reason });
            }
            return Some(key);
        }
        self.invalid.remove(&key);
        let value = value.expect("it was checked");
        if self.entries.insert(key.clone(), revision) != Some(revision) {
            changes.push(Change::Put {
                key: key.clone(),
                value,
            });
        }
        Some(key)
    }

    fn forget(&mut self, key: String, changes: &mut Vec<Change>) {
        if let Some(own) = self.own.get_mut(&key) {
            own.is_lost = true;
        }
        self.invalid.remove(&key);
        if self.entries.remove(&key).is_some() {
            changes.push(Change::Deleted { key });
        }
    }

    /// Applies the messages of the watch that are here. False: it has ended.
    fn follow(&mut self, changes: &mut Vec<Change>) -> bool {
        let Some(watch) = &mut self.watch else {
            return false;
        };
        let (lines, mut is_open) = watch.read();
        // One after the other: parsed, messages take many times their bytes.
        for line in lines.split(|&byte| byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let Ok(message) = parse(line) else {
                is_open = false;
                break;
            };
            let result = &message["result"];
            if message.get("error").is_some() || result["canceled"].as_bool() == Some(true) {
                is_open = false; // such as for revisions that were compacted
                break;
            }
            for event in result["events"].as_array().into_iter().flatten() {
                let kv = &event["kv"];
                self.revision = self
                    .revision
                    .max(number(&kv["mod_revision"]).unwrap_or_default());
                if event["type"].as_str() == Some("DELETE") {
                    let full = kv["key"].as_str().and_then(|key| STANDARD.decode(key).ok());
                    let full = full.unwrap_or_default();
                    let full = String::from_utf8_lossy(&full).into_owned();
                    if let Some(key) = full.strip_prefix(&self.options.prefix) {
                        self.forget(key.to_owned(), changes);
                    }
                } else {
                    self.put_change(kv, changes);
                }
            }
        }
        if !is_open {
            self.watch = None;
        }
        is_open
    }

    /// Asks whether the watch has missed anything.
    fn check(&mut self) -> io::Result<()> {
        let mut body = self.range();
        body["limit"] = json!("1");
        body["keys_only"] = json!(true);
        body["sort_order"] = json!("DESCEND");
        body["sort_target"] = json!("MOD");
        let answer = self.call("/v3/kv/range", &body)?;
        let latest = number(&answer["kvs"][0]["mod_revision"]).unwrap_or_default();
        let count = number(&answer["count"]).unwrap_or_default();
        // An entry that was replaced by something invalid stays one, and is one key.
        let replaced = self
            .invalid
            .iter()
            .filter(|key| self.entries.contains_key(*key));
        let known = to_i64(self.entries.len() + self.invalid.len() - replaced.count());
        // Beyond the limits, keys are there that are not kept.
        let is_counted = count <= to_i64(KEYS_MAX) && self.invalid.len() < INVALID_MAX;
        let differs = latest > self.revision || count != known && is_counted;
        // A single difference may be a change on its way.
        if differs && self.is_suspect {
            self.watch = None;
        }
        self.is_suspect = differs;
        Ok(())
    }

    fn try_poll(&mut self, now: SimTime, changes: &mut Vec<Change>) -> io::Result<()> {
        if !self.follow(changes) {
            self.list(changes)?;
            self.next_check = now + CHECK_NS;
        }
        if now >= self.next_check {
            self.next_check = now + CHECK_NS;
            self.check()?;
            if self.watch.is_none() {
                self.list(changes)?;
            }
        }
        Ok(())
    }
}

impl Backend for Etcd {
    fn put(
        &mut self,
        _now: SimTime,
        key: &str,
        value: &str,
        lease: Duration,
    ) -> Result<(), BackendError> {
        assert!(is_key(key), "keys are made by this program: {key}");
        assert!(value.len() <= VALUE_BYTES_MAX, "values are, too");
        // The entry before stays known if this fails: the next renewal tries again.
        let id = self
            .publish(key, value, lease)
            .map_err(|error| self.failed("publishing", error))?;
        let own = Own {
            value: value.to_owned(),
            lease,
            id,
            is_lost: false,
        };
        if let Some(before) = self.own.insert(key.to_owned(), own) {
            // Its key has another lease now. Otherwise it ends by itself.
            let _ = self.call("/v3/lease/revoke", &json!({"ID": before.id}));
        }
        Ok(())
    }

    fn renew(&mut self, now: SimTime, key: &str) -> Result<(), BackendError> {
        let Some(own) = self.own.get(key) else {
            return Ok(());
        };
        let (value, lease, is_lost) = (own.value.clone(), own.lease, own.is_lost);
        let body = json!({"ID": own.id});
        let kept = self
            .call("/v3/lease/keepalive", &body)
            .map_err(|error| self.failed("renewing", error))?;
        // A lease that has ended has no time left.
        let is_alive = number(&kept["result"]["TTL"]).is_some_and(|seconds| seconds > 0);
        if is_alive && !is_lost {
            return Ok(());
        }
        self.put(now, key, &value, lease)
    }

    fn delete(&mut self, key: &str) -> Result<(), BackendError> {
        let Some(own) = self.own.remove(key) else {
            return Ok(());
        };
        // Its key goes with the lease.
        self.call("/v3/lease/revoke", &json!({"ID": own.id}))
            .map(drop)
            .map_err(|error| self.failed("removing", error))
    }

    fn poll(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<SimTime, BackendError> {
        if let Err(error) = self.try_poll(now, changes) {
            self.watch = None;
            return Err(self.failed("reading", error));
        }
        Ok(self.next_check)
    }

    fn wait(&mut self, timeout: Duration) {
        let socket = self
            .watch
            .as_ref()
            .map(|watch| watch.stream.socket().as_fd());
        self.wakes.wait(socket, timeout);
    }

    fn waker(&self) -> Waker {
        self.wakes.waker()
    }
}

fn place(options: &EtcdOptions) -> String {
    format!("etcd {}/{}", options.servers.join(","), options.prefix)
}

/// An error for an answer that etcd does not give.
fn odd(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the server's answer {what}; is it etcd?"),
    )
}

/// A 64-bit number, which the gateway writes as a string.
fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(late());
    }
    Ok(left)
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time")
}

/// A socket's time limit gives errors that do not say so, such as `Resource temporarily unavailable`.
fn in_time<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => late(),
        _ => error,
    })
}

/// Whether a server has refused the token of a call.
fn is_sign_in(error: &io::Error) -> bool {
    let text = error.to_string();
    text.contains("invalid auth token") || text.contains("auth store is old")
}

/// Tokens stand in headers.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.len() <= 8_192 && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Where a call goes, and as whom.
struct Call<'a> {
    server: &'a str,
    tls: Option<&'a Arc<ClientConfig>>,
    token: Option<&'a str>,
}

impl Call<'_> {
    /// Connects and sends a request.
    fn send(&self, path: &str, body: &Value, end: Instant) -> io::Result<Stream> {
        let mut connected = Err(io::Error::new(
            io::ErrorKind::NotFound,
            "its name has no address",
        ));
        for address in self.server.to_socket_addrs()? {
            connected = in_time(TcpStream::connect_timeout(&address, left(end)?));
            if connected.is_ok() {
                break;
            }
        }
        let mut stream = in_time(Stream::new(connected?, self.server, self.tls, end))?;
        let body = body.to_string();
        let token = self
            .token
            .map(|token| format!("authorization: {token}\r\n"));
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n{}content-length: {}\r\n\r\n{body}",
            self.server,
            token.unwrap_or_default(),
            body.len()
        );
        stream.socket().set_write_timeout(Some(left(end)?))?;
        in_time(stream.write_all(request.as_bytes()))?;
        in_time(stream.flush())?;
        Ok(stream)
    }

    /// One call, on a connection of its own.
    fn ask(&self, path: &str, body: &Value, end: Instant) -> io::Result<Value> {
        let mut stream = self.send(path, body, end)?;
        let mut answer = Answer::default();
        while !answer.is_over {
            if !in_time(answer.fill(&mut stream, Some(end)))? {
                let hint = match self.tls {
                    None => "; if it wants TLS, write etcds://",
                    Some(_) => "",
                };
                let text = format!("it closed the connection{hint}");
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
        }
        let parsed = parse(&answer.body);
        if answer.status != 200 {
            let text = parsed.as_ref().ok();
            let text = text.and_then(|text| text["message"].as_str().or(text["error"].as_str()));
            let text = text.map_or_else(|| String::from_utf8_lossy(&answer.body), Into::into);
            let text: String = text.trim().chars().take(200).collect();
            return Err(io::Error::other(format!(
                "status {}: {}",
                answer.status,
                foreign(&text)
            )));
        }
        parsed
    }
}

/// A JSON text of bounded size in memory.
fn parse(text: &[u8]) -> io::Result<Value> {
    let values = text
        .iter()
        .filter(|&&byte| matches!(byte, b',' | b'[' | b'{'));
    if values.count() > VALUES_MAX {
        return Err(odd("has too many values"));
    }
    serde_json::from_slice(text).map_err(|_| odd("is not JSON"))
}

/// A watch that runs.
#[derive(Debug)]
struct Watch {
    stream: Stream,
    answer: Answer,
}

impl Watch {
    fn start(call: &Call<'_>, body: &Value, end: Instant) -> io::Result<Watch> {
        let stream = call.send("/v3/watch", body, end)?;
        stream.socket().set_nonblocking(true)?;
        Ok(Watch {
            stream,
            answer: Answer::default(),
        })
    }

    /// The messages that are here, each a line, of [`MESSAGE_BYTES_MAX`] at most, and whether more may come.
    fn read(&mut self) -> (Vec<u8>, bool) {
        let mut is_open = true;
        while self.answer.body.len() < MESSAGE_BYTES_MAX {
            match self.answer.fill(&mut self.stream, None) {
                Ok(true) if !self.answer.is_over => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                _ => {
                    is_open = false;
                    break;
                }
            }
        }
        is_open &= self.answer.status == 0 || self.answer.status == 200;
        // A message is a line.
        let Some(end) = self.answer.body.iter().rposition(|&byte| byte == b'\n') else {
            is_open &= self.answer.body.len() < MESSAGE_BYTES_MAX;
            return (Vec::new(), is_open);
        };
        let rest = self.answer.body.split_off(end + 1);
        let lines = std::mem::replace(&mut self.answer.body, rest);
        (lines, is_open)
    }
}

/// An HTTP/1.1 answer as far as it was read.
#[derive(Debug, Default)]
struct Answer {
    /// 0: its head is not here.
    status: u16,
    /// Bytes that were not decoded.
    raw: Vec<u8>,
    body: Vec<u8>,
    /// Bytes of the body, or of the chunk, that are to come; `None`: the size of a chunk is.
    left: Option<usize>,
    is_chunked: bool,
    is_over: bool,
}

impl Answer {
    /// Reads once. False: the connection was closed.
    fn fill(&mut self, stream: &mut Stream, end: Option<Instant>) -> io::Result<bool> {
        if let Some(end) = end {
            stream.socket().set_read_timeout(Some(left(end)?))?;
        }
        let mut piece = [0; 16 << 10];
        let read = match stream.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            read => read?,
        };
        self.raw.extend_from_slice(&piece[..read]);
        self.decode()?;
        if self.raw.len() + self.body.len() > ANSWER_BYTES_MAX {
            return Err(odd("is too long"));
        }
        Ok(read > 0)
    }

    fn decode(&mut self) -> io::Result<()> {
        if self.status == 0 && !self.take_head()? {
            return Ok(());
        }
        loop {
            let Some(bytes) = self.left else {
                if self.take_chunk_size()? {
                    continue;
                }
                return Ok(());
            };
            let now = bytes.min(self.raw.len());
            self.body.extend(self.raw.drain(..now));
            self.left = Some(bytes - now);
            if now < bytes {
                return Ok(());
            }
            if !self.is_chunked {
                self.is_over = true;
                return Ok(());
            }
            // The chunk's line end.
            if self.raw.len() < 2 {
                return Ok(());
            }
            self.raw.drain(..2);
            self.left = None;
        }
    }

    /// Reads the size of a chunk. False: it is not here, or it was the last one.
    fn take_chunk_size(&mut self) -> io::Result<bool> {
        let Some(end) = self.raw.windows(2).position(|pair| pair == b"\r\n") else {
            return Ok(false);
        };
        let line = String::from_utf8_lossy(&self.raw[..end]).into_owned();
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).map_err(|_| odd("has an invalid chunk"))?;
        if size > ANSWER_BYTES_MAX {
            return Err(odd("is too long"));
        }
        self.raw.drain(..end + 2);
        self.is_over = size == 0;
        self.left = Some(size).filter(|_| size > 0);
        Ok(size > 0)
    }

    /// Reads the head. False: it is not here as a whole.
    fn take_head(&mut self) -> io::Result<bool> {
        let Some(end) = self.raw.windows(4).position(|four| four == b"\r\n\r\n") else {
            return Ok(false);
        };
        let head = String::from_utf8_lossy(&self.raw[..end]).into_owned();
        self.raw.drain(..end + 4);
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap_or_default();
        let status = status
            .strip_prefix("HTTP/1.")
            .and_then(|rest| rest.split(' ').nth(1));
        self.status = status
            .and_then(|status| status.parse().ok())
            .ok_or_else(|| odd("is not HTTP"))?;
        for line in lines {
            let Some((name, value)) = line.split_once(':') else {
                continue;
            };
            match (&*name.to_ascii_lowercase(), value.trim()) {
                ("content-length", length) => {
                    self.left = Some(length.parse().map_err(|_| odd("has no length"))?);
                }
                ("transfer-encoding", coding) => {
                    self.is_chunked = coding.eq_ignore_ascii_case("chunked");
                }
                _ => {}
            }
        }
        if self.is_chunked {
            self.left = None;
        } else if self.left.is_none() {
            return Err(odd("has no length"));
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
