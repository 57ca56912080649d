//! A connection to a server of NATS: lines of text over a socket, and messages of bounded size.
//!
//! The client `async-nats` is not used here: it reads lines and messages of any length, so that a server could take all
//! memory of a process that only joins a fleet; it switches to TLS if the server wants to, though the address says
//! otherwise; and it needs a runtime, which processes that find each other in a folder do not have.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use serde_json::{Value, json};
use slipstream_base::text::foreign;

use super::KEYS_MAX;
use crate::access::Stream;

/// A message of a server, and the bytes of it that are here.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// A line of a server: its greeting lists the servers of its cluster.
const LINE_BYTES_MAX: usize = 256 << 10;
/// Messages that are here and were not applied.
const QUEUE_MAX: usize = 4 * KEYS_MAX;
/// Subscription of the answers to requests. Watches have later numbers.
const REPLIES: u64 = 1;

/// An error for bytes that NATS does not send.
pub(super) fn odd(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the server {what}; is it NATS?"),
    )
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time")
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(late());
    }
    Ok(left)
}

/// A socket's time limit gives errors that do not say so.
fn in_time<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => late(),
        _ => error,
    })
}

/// A message of a server.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) subject: String,
    pub(super) subscription: u64,
    pub(super) reply: String,
    /// With their first line; empty: none.
    headers: String,
    pub(super) payload: Vec<u8>,
}

impl Message {
    /// `NATS/1.0 503`: such messages are of the server itself.
    pub(super) fn status(&self) -> Option<u16> {
        let line = self.headers.lines().next()?;
        line.strip_prefix("NATS/1.0")?.trim().get(..3)?.parse().ok()
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.headers.lines().skip(1);
        lines
            .filter_map(|line| line.split_once(':'))
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
    }
}

/// A piece of a server's bytes.
enum Piece {
    Message(Message),
    Pong,
    Other,
}

/// A connection to a server.
#[derive(Debug)]
pub(super) struct Link {
    stream: Stream,
    /// Bytes that were not parsed.
    raw: Vec<u8>,
    /// Precedes the subjects of answers.
    inbox: String,
    requests: u64,
    subscriptions: u64,
    /// Messages of watches that were not applied.
    queue: VecDeque<Message>,
}

impl Link {
    pub(super) fn open(
        server: &str,
        tls: Option<&Arc<ClientConfig>>,
        user: Option<(&str, String)>,
        end: Instant,
    ) -> io::Result<Link> {
        let mut connected = Err(io::Error::new(
            io::ErrorKind::NotFound,
            "its name has no address",
        ));
        for address in server.to_socket_addrs()? {
            connected = in_time(TcpStream::connect_timeout(&address, left(end)?));
            if connected.is_ok() {
                break;
            }
        }
        let socket = connected?;
        socket.set_nodelay(true)?;
        let random = std::hash::RandomState::new().build_hasher().finish();
        let mut link = Link {
            stream: Stream::Plain(socket),
            raw: Vec::new(),
            inbox: format!("_INBOX.slipstream{random:016x}"),
            requests: 0,
            subscriptions: REPLIES,
            queue: VecDeque::new(),
        };
        let line = loop {
            match link.take_line()? {
                Some(line) => break line,
                None => link.fill(end)?,
            }
        };
        let info = line
            .strip_prefix("INFO ")
            .ok_or_else(|| odd("sends no greeting"))?;
        let info: Value = serde_json::from_str(info).map_err(|_| odd("sends no greeting"))?;
        let wants_tls = info["tls_required"].as_bool() == Some(true);
        match tls {
            None if wants_tls => return Err(io::Error::other("it wants TLS: write tls://")),
            Some(_) if !wants_tls && info["tls_available"].as_bool() != Some(true) => {
                return Err(io::Error::other("it has no TLS: nats:// is without"));
            }
            None => {}
            Some(_) => {
                if !link.raw.is_empty() {
                    return Err(odd("sends more than a greeting"));
                }
                let Stream::Plain(socket) = link.stream else {
                    unreachable!("it was just connected")
                };
                link.stream = in_time(Stream::new(socket, server, tls, end))?;
            }
        }
        if info["jetstream"].as_bool() == Some(false) {
            return Err(io::Error::other("its JetStream is off: start it with -js"));
        }
        let mut connect = json!({
            "verbose": false, "pedantic": false, "tls_required": tls.is_some(), "name": "slipstream",
            "lang": "rust", "version": env!("CARGO_PKG_VERSION"), "protocol": 1, "headers": true, "no_responders": true,
        });
        if let Some((user, password)) = user {
            connect["user"] = json!(user);
            connect["pass"] = json!(password);
        }
        let inbox = link.inbox.clone();
        link.send(
            format!("CONNECT {connect}\r\nSUB {inbox}.* {REPLIES}\r\nPING\r\n").as_bytes(),
            end,
        )?;
        loop {
            match link.take()? {
                Some(Piece::Pong) => return Ok(link),
                Some(_) => {}
                None => link.fill(end)?,
            }
        }
    }

    fn send(&mut self, bytes: &[u8], end: Instant) -> io::Result<()> {
        let socket = self.stream.socket();
        socket.set_nonblocking(false)?;
        socket.set_write_timeout(Some(left(end)?))?;
        in_time(self.stream.write_all(bytes))?;
        in_time(self.stream.flush())
    }

    /// Reads once, within the time.
    fn fill(&mut self, end: Instant) -> io::Result<()> {
        let socket = self.stream.socket();
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(left(end)?))?;
        in_time(self.read()).map(drop)
    }

    fn read(&mut self) -> io::Result<usize> {
        let mut piece = [0; 16 << 10];
        let read = match self.stream.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(0),
            read => read?,
        };
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.raw.extend_from_slice(&piece[..read]);
        if self.raw.len() > MESSAGE_BYTES_MAX + LINE_BYTES_MAX {
            return Err(odd("sends too much"));
        }
        Ok(read)
    }

    /// Queues the messages that are here.
    pub(super) fn receive(&mut self) -> io::Result<()> {
        loop {
            self.stream.socket().set_nonblocking(true)?;
            let read = self.read();
            let is_end = match read {
                Ok(_) => false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
                Err(error) => return Err(error),
            };
            while let Some(piece) = self.take()? {
                if let Piece::Message(message) = piece {
                    self.keep(message)?;
                }
            }
            if is_end {
                return Ok(());
            }
        }
    }

    fn keep(&mut self, message: Message) -> io::Result<()> {
        if message.subscription == REPLIES {
            return Ok(()); // to a request that was given up
        }
        if self.queue.len() >= QUEUE_MAX {
            return Err(odd("sends more messages than a bucket has"));
        }
        self.queue.push_back(message);
        Ok(())
    }

    /// The next message of a watch.
    pub(super) fn next(&mut self, end: Instant) -> io::Result<Message> {
        if let Some(message) = self.queue.pop_front() {
            return Ok(message);
        }
        loop {
            match self.take()? {
                Some(Piece::Message(message)) if message.subscription != REPLIES => {
                    return Ok(message);
                }
                Some(_) => {}
                None => self.fill(end)?,
            }
        }
    }

    /// Removes the messages of watches that are here.
    pub(super) fn take_messages(&mut self) -> VecDeque<Message> {
        std::mem::take(&mut self.queue)
    }

    /// The socket, to wait for.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.socket().as_fd()
    }

    /// Begins a subscription. Returns its number and subject.
    pub(super) fn subscribe(&mut self, end: Instant) -> io::Result<(u64, String)> {
        self.subscriptions += 1;
        let number = self.subscriptions;
        let subject = format!("{}w{number}", self.inbox);
        self.send(format!("SUB {subject} {number}\r\n").as_bytes(), end)?;
        Ok((number, subject))
    }

    /// Sends a request, and waits for its answer.
    pub(super) fn request(
        &mut self,
        subject: &str,
        headers: &str,
        payload: &[u8],
        end: Instant,
    ) -> io::Result<Message> {
        self.requests += 1;
        let reply = format!("{}.{}", self.inbox, self.requests);
        let mut bytes = if headers.is_empty() {
            format!("PUB {subject} {reply} {}\r\n", payload.len()).into_bytes()
        } else {
            let headers = format!("NATS/1.0\r\n{headers}\r\n");
            let (of_headers, all) = (headers.len(), headers.len() + payload.len());
            format!("HPUB {subject} {reply} {of_headers} {all}\r\n{headers}").into_bytes()
        };
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(b"\r\n");
        self.send(&bytes, end)?;
        loop {
            match self.take()? {
                Some(Piece::Message(message)) if message.subject == reply => {
                    if message.status() == Some(503) {
                        let text = "no bucket takes it; is JetStream on (-js)?";
                        return Err(io::Error::new(io::ErrorKind::NotFound, text));
                    }
                    return Ok(message);
                }
                Some(Piece::Message(message)) => self.keep(message)?,
                Some(_) => {}
                None => self.fill(end)?,
            }
        }
    }

    /// The next line, if it is here as a whole.
    fn take_line(&mut self) -> io::Result<Option<String>> {
        let Some(end) = self.raw.windows(2).position(|pair| pair == b"\r\n") else {
            if self.raw.len() > LINE_BYTES_MAX {
                return Err(odd("sends a line without an end"));
            }
            return Ok(None);
        };
        let line = String::from_utf8_lossy(&self.raw[..end]).into_owned();
        self.raw.drain(..end + 2);
        Ok(Some(line))
    }

    /// The next piece, if it is here as a whole.
    fn take(&mut self) -> io::Result<Option<Piece>> {
        let Some(end) = self.raw.windows(2).position(|pair| pair == b"\r\n") else {
            return self.take_line().map(|_| None);
        };
        let line = String::from_utf8_lossy(&self.raw[..end]).into_owned();
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let size = |word: &str| {
            let size = word.parse::<usize>().ok();
            size.filter(|&size| size <= MESSAGE_BYTES_MAX)
                .ok_or_else(|| odd("sends a message of an odd size"))
        };
        let (subject, subscription, reply, of_headers, all) = match words[..] {
            ["MSG", subject, number, all] => (subject, number, "", 0, size(all)?),
            ["MSG", subject, number, reply, all] => (subject, number, reply, 0, size(all)?),
            ["HMSG", subject, number, some, all] => (subject, number, "", size(some)?, size(all)?),
            ["HMSG", subject, number, reply, some, all] => {
                (subject, number, reply, size(some)?, size(all)?)
            }
            _ => {
                self.raw.drain(..end + 2);
                return self.control(&line).map(Some);
            }
        };
        let begin = end + 2;
        if of_headers > all {
            return Err(odd("sends a message of an odd size"));
        }
        if self.raw.len() < begin + all + 2 {
            return Ok(None);
        }
        let headers = &self.raw[begin..begin + of_headers];
        let message = Message {
            subject: subject.to_owned(),
            subscription: number(subscription)?,
            reply: reply.to_owned(),
            headers: String::from_utf8_lossy(headers).into_owned(),
            payload: self.raw[begin + of_headers..begin + all].to_vec(),
        };
        self.raw.drain(..begin + all + 2);
        Ok(Some(Piece::Message(message)))
    }

    fn control(&mut self, line: &str) -> io::Result<Piece> {
        match line {
            "PING" => {
                self.stream.write_all(b"PONG\r\n")?;
                self.stream.flush()?;
                Ok(Piece::Other)
            }
            "PONG" => Ok(Piece::Pong),
            "+OK" => Ok(Piece::Other),
            _ if line.starts_with("INFO ") => Ok(Piece::Other),
            _ => {
                let error = line
                    .strip_prefix("-ERR ")
                    .ok_or_else(|| odd("sends an odd line"))?;
                let error: String = error.trim_matches('\'').chars().take(200).collect();
                Err(io::Error::other(foreign(&error).into_owned()))
            }
        }
    }
}

fn number(word: &str) -> io::Result<u64> {
    word.parse().map_err(|_| odd("sends an odd number"))
}
