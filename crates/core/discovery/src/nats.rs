//! Entries as keys of a bucket of NATS (JetStream's key-value store).
//!
//! ```text
//!   $KV.BUCKET.KEY = {"lease_ms": …, "value": …}, published again by each renewal
//! ```
//!
//! Servers before 2.11 end keys by one age per bucket, and publish nothing to watches then. So the value carries its
//! lease, and a watch ends entries that were not published again in that time, provided that the watch was alive: a
//! server sends something each [`HEARTBEAT`] at least. The bucket's own age, [`LEASE_MAX`], removes the keys of
//! processes that have ended. A watch without a message for [`SILENCE_NS`], or with a missing number, begins anew.
//!
//! One thread drives a backend, so sockets block, and there is no runtime: [`link`] speaks NATS's protocol.

mod link;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use slipstream_base::SimTime;
use slipstream_base::width::{nanos, to_u32};

use crate::access::{Access, Address};
use crate::folder::LEASE_MAX;
use crate::notify::Wakes;
use crate::{Backend, BackendError, Change, VALUE_BYTES_MAX, Waker, is_key};
use link::{Link, Message, odd};

/// Port of NATS's clients.
const PORT: u16 = 4222;
/// Keys that are followed.
const KEYS_MAX: usize = 4_096;
/// Invalid keys that are kept, so that each is reported once.
const INVALID_MAX: usize = 1_024;
/// Time for one call, at all servers together: a lease of 3 s is renewed each second.
const CALL_TIME: Duration = Duration::from_millis(1_500);
/// Idle time after which a server says that the watch is alive.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// A watch without a message for this long is dead.
const SILENCE_NS: u64 = 3_000_000_000;
/// Latest time of the next look.
const CHECK_NS: u64 = 1_000_000_000;

/// Where a bucket is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsOptions {
    /// Servers, `HOST:PORT`, tried in turn until one answers.
    pub servers: Vec<String>,
    /// Its name.
    pub bucket: String,
    /// TLS, and this process's proofs.
    pub access: Access,
}

impl NatsOptions {
    /// Parses `nats://HOST[:PORT][,HOST[:PORT]…][/BUCKET]`, or the same with `tls://`, and parameters ([`Access`]). The
    /// port is 4222 by default, the bucket `slipstream`.
    ///
    /// # Errors
    /// The fault, as the end of a sentence.
    pub fn parse(text: &str) -> Result<NatsOptions, String> {
        let (rest, tls) = match (text.strip_prefix("nats://"), text.strip_prefix("tls://")) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) => return Err("does not begin with nats:// or tls://".into()),
        };
        let Address {
            servers,
            path,
            access,
        } = Address::parse(rest, PORT, tls, "tls://")?;
        let bucket = if path.is_empty() { "slipstream" } else { path };
        if !is_key(bucket) {
            return Err(format!(
                "has the bucket `{bucket}`; use up to 128 letters, digits, `-` and `_`"
            ));
        }
        Ok(NatsOptions {
            servers,
            bucket: bucket.to_owned(),
            access,
        })
    }
}

/// Entries as keys of a bucket; see the module's documentation.
#[derive(Debug)]
pub struct Nats {
    options: NatsOptions,
    tls: Option<Arc<ClientConfig>>,
    /// The server that answered last.
    current: usize,
    wakes: Wakes,
    link: Option<Link>,
    watch: Option<Watch>,
    /// Entries of this process: value and lease.
    own: BTreeMap<String, (String, Duration)>,
    entries: BTreeMap<String, Entry>,
    invalid: BTreeSet<String>,
}

#[derive(Debug)]
struct Entry {
    value: String,
    lease_ns: u64,
    /// It ends then unless it is published again.
    until: SimTime,
}

/// A consumer of the bucket's messages.
#[derive(Debug)]
struct Watch {
    subscription: u64,
    /// Number of its last message.
    number: u64,
    /// Time of its last message.
    last_at: SimTime,
}

/// The value of a key.
#[derive(Debug, Serialize, Deserialize)]
struct Published {
    lease_ms: u64,
    value: String,
}

impl Nats {
    /// Does not connect yet.
    ///
    /// # Errors
    ///
    /// [`BackendError`] if a file cannot be used, or the process has no file descriptor left.
    pub fn new(options: NatsOptions) -> Result<Nats, BackendError> {
        let failed = |operation, hint| {
            let place = place(&options);
            move |source| BackendError {
                place,
                operation,
                hint,
                source,
            }
        };
        let tls = options.access.tls();
        let tls = tls.and_then(|tls| options.access.user().map(|_| tls));
        let tls = tls.map_err(failed(
            "reading its files",
            "check the parameters of its address",
        ))?;
        let wakes = Wakes::new().map_err(failed("preparing to watch", "raise ulimit -n"))?;
        Ok(Nats {
            options,
            tls,
            current: 0,
            wakes,
            link: None,
            watch: None,
            own: BTreeMap::new(),
            entries: BTreeMap::new(),
            invalid: BTreeSet::new(),
        })
    }

    fn failed(&mut self, operation: &'static str, source: io::Error) -> BackendError {
        self.link = None;
        BackendError {
            place: place(&self.options),
            operation,
            hint: "check that NATS answers there, with JetStream, or name another with --discovery",
            source,
        }
    }

    /// Connects unless there is a connection. A server gets a share of the time.
    fn connect(&mut self, end: Instant) -> io::Result<()> {
        if self.link.is_some() {
            return Ok(());
        }
        self.watch = None;
        let count = self.options.servers.len();
        let mut error = io::Error::from(io::ErrorKind::NotFound);
        for step in 0..count {
            let at = (self.current + step) % count;
            let share = end.saturating_duration_since(Instant::now()) / to_u32(count - step);
            let server = &self.options.servers[at];
            let user = self.options.access.user()?;
            match Link::open(server, self.tls.as_ref(), user, Instant::now() + share) {
                Ok(link) => {
                    self.current = at;
                    self.link = Some(link);
                    return Ok(());
                }
                Err(failed) => error = failed,
            }
        }
        Err(error)
    }

    fn stream(&self) -> String {
        format!("KV_{}", self.options.bucket)
    }

    fn subject(&self, key: &str) -> String {
        format!("$KV.{}.{key}", self.options.bucket)
    }

    /// A request of JetStream's API.
    fn api(&mut self, name: &str, body: &Value, end: Instant) -> io::Result<Value> {
        let subject = format!("$JS.API.{name}.{}", self.stream());
        let link = self.link.as_mut().expect("it was connected");
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        answer(&link.request(&subject, "", body.as_bytes(), end)?)
    }

    /// Makes the bucket unless it is there.
    fn make_bucket(&mut self, end: Instant) -> io::Result<()> {
        let found = self.api("STREAM.INFO", &Value::Null, end);
        if !found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(()); // or another fault, which the next request shows
        }
        let config = json!({
            "name": self.stream(),
            "subjects": [self.subject(">")],
            "max_msgs_per_subject": 1,
            "max_age": nanos(LEASE_MAX),
            "storage": "file",
            "num_replicas": 1,
            "retention": "limits",
            "discard": "new",
            "allow_rollup_hdrs": true,
            "deny_delete": true,
            "allow_direct": true,
        });
        match self.api("STREAM.CREATE", &config, end) {
            // Another process was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map(drop),
        }
    }

    /// Publishes `payload` under `key`, in a bucket that is made if it is not there.
    fn publish(&mut self, key: &str, headers: &str, payload: &[u8]) -> io::Result<()> {
        let end = Instant::now() + CALL_TIME;
        let is_new = self.link.is_none();
        match self.publish_until(key, headers, payload, end) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.link.is_some() => {
                self.make_bucket(end)?;
                self.publish_until(key, headers, payload, end)
            }
            // A connection that had ended before: another one is no second attempt.
            Err(_) if !is_new && self.link.is_none() => {
                self.publish_until(key, headers, payload, end)
            }
            done => done,
        }
    }

    fn publish_until(
        &mut self,
        key: &str,
        headers: &str,
        payload: &[u8],
        end: Instant,
    ) -> io::Result<()> {
        self.connect(end)?;
        let subject = self.subject(key);
        let link = self.link.as_mut().expect("it was connected");
        let done = link.request(&subject, headers, payload, end);
        if done
            .as_ref()
            .is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
        {
            self.link = None;
        }
        answer(&done?).map(drop)
    }

    /// Begins a watch, and applies the messages of the bucket.
    fn list(&mut self, now: SimTime, changes: &mut Vec<Change>) -> io::Result<()> {
        let end = Instant::now() + CALL_TIME;
        self.connect(end)?;
        self.make_bucket(end)?;
        let link = self.link.as_mut().expect("it was connected");
        let (subscription, inbox) = link.subscribe(end)?;
        drop(link.take_messages());
        let config = json!({
            "deliver_subject": inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "replay_policy": "instant",
            "max_deliver": 1,
            "filter_subject": self.subject(">"),
            "idle_heartbeat": nanos(HEARTBEAT),
            "mem_storage": true,
            "num_replicas": 1,
        });
        let request = json!({"stream_name": self.stream(), "config": config});
        let made = self.api("CONSUMER.CREATE", &request, end)?;
        let expected = made["num_pending"].as_u64().unwrap_or_default();
        let mut watch = Watch {
            subscription,
            number: 0,
            last_at: now,
        };
        let link = self.link.as_mut().expect("it was connected");
        let mut found = Vec::new();
        while watch.number < expected {
            let message = link.next(end)?;
            match watch.take(message, now) {
                Took::Entry(delivered) => found.push(delivered),
                Took::Nothing => {}
                Took::Gap => return Err(odd("skips messages")),
            }
        }
        // Renewals may have been missed. Entries that are not there are no deletions: those leave a mark.
        for entry in self.entries.values_mut() {
            entry.until = entry.until.max(now + entry.lease_ns);
        }
        self.watch = Some(watch);
        let newest = found.iter().map(|of| of.time_ns).max().unwrap_or_default();
        for delivered in found {
            self.apply(delivered, newest, now, changes);
        }
        Ok(())
    }

    /// Applies a message of the watch. `newest_ns`: time of the newest one that is known.
    fn apply(
        &mut self,
        delivered: Delivered,
        newest_ns: u64,
        now: SimTime,
        changes: &mut Vec<Change>,
    ) {
        let prefix = self.subject("");
        let Some(key) = delivered.subject.strip_prefix(&prefix).map(str::to_owned) else {
            return;
        };
        let Some(payload) = delivered.payload else {
            self.invalid.remove(&key);
            if self.entries.remove(&key).is_some() {
                changes.push(Change::Deleted { key });
            }
            return;
        };
        let published = serde_json::from_slice::<Published>(&payload);
        let fault = match &published {
            _ if !is_key(&key) => Some("its key is not one of an entry".to_owned()),
            _ if self.entries.len() >= KEYS_MAX && !self.entries.contains_key(&key) => {
                Some(format!("more than {KEYS_MAX} keys are there"))
            }
            Err(error) => Some(format!("its value is not one of an entry: {error}")),
            Ok(of) if of.value.len() > VALUE_BYTES_MAX => {
                Some(format!("its value has more than {VALUE_BYTES_MAX} bytes"))
            }
            Ok(of) if u128::from(of.lease_ms) > LEASE_MAX.as_millis() => Some(format!(
                "its lease is longer than {} s",
                LEASE_MAX.as_secs()
            )),
            Ok(_) => None,
        };
        if let Some(reason) = fault {
            if self.invalid.len() < INVALID_MAX && self.invalid.insert(key) {
                let name = delivered.subject;
                changes.push(Change::Invalid { name, reason });
            }
            return;
        }
        self.invalid.remove(&key);
        let Published { lease_ms, value } = published.expect("it was checked");
        let lease_ns = lease_ms * 1_000_000;
        if newest_ns.saturating_sub(delivered.time_ns) > lease_ns {
            return; // its process has ended; an entry that is known ends by its lease
        }
        let until = now + lease_ns;
        let same = self.entries.get_mut(&key).filter(|of| of.value == value);
        if let Some(entry) = same {
            (entry.lease_ns, entry.until) = (lease_ns, until);
            return;
        }
        let entry = Entry {
            value: value.clone(),
            lease_ns,
            until,
        };
        self.entries.insert(key.clone(), entry);
        changes.push(Change::Put { key, value });
    }

    /// Applies the messages that have arrived. False: the watch has to begin anew.
    fn follow(&mut self, now: SimTime, changes: &mut Vec<Change>) -> bool {
        let (Some(link), Some(mut watch)) = (self.link.as_mut(), self.watch.take()) else {
            return false;
        };
        let mut is_open = link.receive().is_ok();
        let messages = link.take_messages();
        for message in messages {
            match watch.take(message, now) {
                Took::Entry(delivered) => {
                    let time_ns = delivered.time_ns;
                    self.apply(delivered, time_ns, now, changes);
                }
                Took::Nothing => {}
                Took::Gap => is_open = false,
            }
        }
        is_open &= now.since(watch.last_at) < SILENCE_NS;
        if is_open {
            self.watch = Some(watch);
        } else {
            self.link = None;
        }
        is_open
    }

    /// Ends entries whose lease is over, as far as the watch was alive.
    fn expire(&mut self, changes: &mut Vec<Change>) {
        let Some(watch) = &self.watch else {
            return;
        };
        let last_at = watch.last_at;
        self.entries.retain(|key, entry| {
            let stays = entry.until > last_at;
            if !stays {
                changes.push(Change::Deleted { key: key.clone() });
            }
            stays
        });
    }
}

impl Backend for Nats {
    fn put(
        &mut self,
        _now: SimTime,
        key: &str,
        value: &str,
        lease: Duration,
    ) -> Result<(), BackendError> {
        assert!(is_key(key), "keys are made by this program: {key}");
        assert!(value.len() <= VALUE_BYTES_MAX, "values are, too");
        let published = Published {
            lease_ms: nanos(lease.min(LEASE_MAX)).div_ceil(1_000_000),
            value: value.to_owned(),
        };
        let payload = serde_json::to_vec(&published).expect("it is plain data");
        self.publish(key, "", &payload)
            .map_err(|error| self.failed("publishing", error))?;
        self.own.insert(key.to_owned(), (value.to_owned(), lease));
        Ok(())
    }

    fn renew(&mut self, now: SimTime, key: &str) -> Result<(), BackendError> {
        let Some((value, lease)) = self.own.get(key).cloned() else {
            return Ok(());
        };
        self.put(now, key, &value, lease)
    }

    fn delete(&mut self, key: &str) -> Result<(), BackendError> {
        if self.own.remove(key).is_none() {
            return Ok(());
        }
        self.publish(key, "KV-Operation: DEL\r\n", b"")
            .map_err(|error| self.failed("removing", error))
    }

    fn poll(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<SimTime, BackendError> {
        if !self.follow(now, changes) {
            self.list(now, changes)
                .map_err(|error| self.failed("reading", error))?;
        }
        self.expire(changes);
        Ok(now + CHECK_NS)
    }

    fn wait(&mut self, timeout: Duration) {
        let socket = self.link.as_ref().map(Link::socket);
        self.wakes.wait(socket, timeout);
    }

    fn waker(&self) -> Waker {
        self.wakes.waker()
    }
}

fn place(options: &NatsOptions) -> String {
    format!(
        "NATS {}, bucket {}",
        options.servers.join(","),
        options.bucket
    )
}

/// The answer of JetStream to a request.
fn answer(message: &Message) -> io::Result<Value> {
    let answer: Value =
        serde_json::from_slice(&message.payload).map_err(|_| odd("answers other than JSON"))?;
    let error = &answer["error"];
    if error.is_null() {
        return Ok(answer);
    }
    let text: String = error["description"]
        .as_str()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect();
    let (code, number) = (error["code"].as_u64(), error["err_code"].as_u64());
    let kind = match (code, number) {
        (Some(404), _) => io::ErrorKind::NotFound,
        (_, Some(10_058)) => io::ErrorKind::AlreadyExists, // a stream of that name, with other settings
        _ => io::ErrorKind::Other,
    };
    Err(io::Error::new(kind, text))
}

/// A message of a bucket.
#[derive(Debug)]
struct Delivered {
    subject: String,
    /// When the server stored it.
    time_ns: u64,
    /// `None`: the key was deleted.
    payload: Option<Vec<u8>>,
}

/// Meaning of a message for a watch.
enum Took {
    Entry(Delivered),
    Nothing,
    /// Messages are missing, or the consumer has ended.
    Gap,
}

impl Watch {
    fn take(&mut self, message: Message, now: SimTime) -> Took {
        if message.subscription != self.subscription {
            return Took::Nothing;
        }
        self.last_at = now;
        match message.status() {
            Some(100) => {
                let last = message.header("Nats-Last-Consumer");
                let last: Option<u64> = last.and_then(|text| text.parse().ok());
                return if last.is_none_or(|last| last == self.number) {
                    Took::Nothing
                } else {
                    Took::Gap
                };
            }
            Some(_) => return Took::Gap,
            None => {}
        }
        // `$JS.ACK.STREAM.CONSUMER.DELIVERED.STREAM_NUMBER.NUMBER.TIME.PENDING`, with two words before STREAM, and
        // perhaps one at the end, in newer servers.
        let words: Vec<&str> = message.reply.split('.').collect();
        let at = if words.len() >= 11 { 8 } else { 6 };
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let (Some(count), Some(time_ns)) = (number(at), number(at + 1)) else {
            return Took::Gap;
        };
        if count != self.number + 1 {
            return Took::Gap;
        }
        self.number = count;
        let is_deleted = message.header("KV-Operation").is_some()
            || message.header("Nats-Marker-Reason").is_some();
        Took::Entry(Delivered {
            subject: message.subject,
            time_ns,
            payload: (!is_deleted).then_some(message.payload),
        })
    }
}

#[cfg(test)]
mod tests;
