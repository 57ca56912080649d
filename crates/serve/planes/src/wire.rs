//! The wire format of frames: bytes, without I/O.
//!
//! Every frame has a header of eight bytes and a body; numbers are little-endian:
//!
//! ```text
//! len: u32 (bytes of the body)   version: u8   kind: u8   zero: u16   body
//! ```
//!
//! A worker process connects to a shard, sends [`Hello`] and gets [`Welcome`] or [`Reject`]. From then
//! on requests and controls flow one way, passes, KV deltas and loads the other. `docs/wire.md`
//! shows every frame byte by byte; a test compares them.
//!
//! All input is checked here once: lengths before any allocation, codes, shapes.

use std::time::Duration;

use slipstream_base::width::{to_u16, to_u32};
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, KvDelta, KvOp, Prompt, RankId, RequestId, Role,
    Tail, WorkerId,
};

use crate::frame::{FrameError, Input, NO_LIMIT, PassFrame, StartRequest, ToWorker};
use crate::stream::{SLOTS_MAX, StreamAddr, StreamId};

/// Version of the protocol.
pub const VERSION: u8 = 4;

/// Bytes before a body.
pub const HEADER_BYTES: usize = 8;

/// Maximum body, bytes. A pass of 65,536 tokens takes 0.8 MiB, a prompt of a million tokens in
/// blocks of 16 half a MiB, a snapshot of a million blocks 8 MiB.
pub const BODY_BYTES_MAX: usize = BODY_BYTES as usize;
const BODY_BYTES: u32 = 16 << 20;

/// Maximum blocks of one rank's cache whose snapshot fits a frame, for any chaining (24 bytes per
/// block in runs of one).
pub const SNAPSHOT_BLOCKS_MAX: u32 = (BODY_BYTES - 64) / 24;

/// First bytes of a greeting's body: `SLIP`. Distinguishes a peer from other clients (such as HTTP).
const MAGIC: u32 = u32::from_le_bytes(*b"SLIP");

/// Maximum workers that one process may announce.
const WORKERS_MAX: usize = 4096;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// Worker to shard, first: [`Hello`].
    Hello = 1,
    /// Shard to worker, as the answer: [`Welcome`].
    Welcome = 2,
    /// Shard to worker, as the answer; the connection then closes: [`Reject`].
    Reject = 3,
    /// Either way, if no other frame was sent for a while. No body.
    Ping = 4,
    /// Either way: no new streams; open ones continue. No body.
    Bye = 5,
    /// Shard to worker: a new stream.
    Start = 16,
    /// Shard to worker: end a stream at its current token.
    Stop = 17,
    /// Shard to worker: the client is gone.
    Kill = 18,
    /// Shard to worker: publish every block of a rank.
    Resync = 19,
    /// Shard to worker: this many more bytes of a stream may be sent.
    Credit = 20,
    /// Shard to worker: more of a stream's prompt.
    Input = 21,
    /// Shard to worker: the prompt of an answer has arrived.
    Receive = 22,
    /// Shard to worker: a held prompt has been fetched.
    Release = 23,
    /// Worker to shard: the output of one pass, or a few.
    Pass = 32,
    /// Worker to shard: changes of a rank's KV cache.
    Kv = 33,
    /// Worker to shard: the contents of a rank's KV cache.
    KvSnapshot = 34,
    /// Worker to shard: a worker accepts requests, or no longer does.
    Ready = 35,
    /// Worker to shard: the loads of the ranks.
    Load = 36,
}

impl FrameKind {
    /// All kinds.
    pub const ALL: [FrameKind; 18] = [
        FrameKind::Hello,
        FrameKind::Welcome,
        FrameKind::Reject,
        FrameKind::Ping,
        FrameKind::Bye,
        FrameKind::Start,
        FrameKind::Stop,
        FrameKind::Kill,
        FrameKind::Resync,
        FrameKind::Credit,
        FrameKind::Input,
        FrameKind::Receive,
        FrameKind::Release,
        FrameKind::Pass,
        FrameKind::Kv,
        FrameKind::KvSnapshot,
        FrameKind::Ready,
        FrameKind::Load,
    ];

    fn of(code: u8) -> Option<FrameKind> {
        FrameKind::ALL.into_iter().find(|&kind| kind as u8 == code)
    }
}

/// Malformed bytes. Close the connection that they came from;
/// the process stays usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Another version.
    #[error(
        "the peer speaks version {0} of the plane and this program version {VERSION}; \
         run frontends and workers of one release"
    )]
    Version(u8),
    /// No such kind.
    #[error("no frame has kind {0}; run frontends and workers of one release")]
    Kind(u8),
    /// The reserved bytes of a header are not zero.
    #[error("a header ends in {0:#06x} where zeros belong; the stream is out of step")]
    Reserved(u16),
    /// The body is longer than the maximum.
    #[error("a {kind:?} frame of {len} bytes is longer than the {max} that are allowed")]
    Length {
        /// Its declared kind.
        kind: FrameKind,
        /// Its declared length, bytes.
        len: u32,
        /// Its maximum, bytes.
        max: usize,
    },
    /// The body ends within a field.
    #[error("a {0:?} frame ends within a field")]
    Cut(FrameKind),
    /// The body continues after its last field.
    #[error("a {kind:?} frame has {bytes} bytes after its last field")]
    Trailing {
        /// The frame's kind.
        kind: FrameKind,
        /// Number of extra bytes.
        bytes: usize,
    },
    /// A field has an invalid value.
    #[error("a {kind:?} frame has a bad {field}: {value}")]
    Value {
        /// The frame's kind.
        kind: FrameKind,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The entries of a pass.
    #[error(transparent)]
    Pass(#[from] FrameError),
    /// A frame about a worker that its sender does not run.
    #[error(
        "a {kind:?} frame speaks of {worker}, which its sender does not run; \
         its process is broken, or not what it says to be"
    )]
    NotIts {
        /// The frame's kind.
        kind: FrameKind,
        /// The worker.
        worker: WorkerId,
    },
    /// A frame of the other direction, or at the wrong time.
    #[error("a {kind:?} frame has no place {place}")]
    Place {
        /// The frame's kind.
        kind: FrameKind,
        /// The place at which it arrived.
        place: &'static str,
    },
}

/// A frame in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawFrame<'a> {
    /// Its kind.
    pub kind: FrameKind,
    /// Its body.
    pub body: &'a [u8],
    /// Its length with its header, bytes.
    pub len: usize,
}

/// The first whole frame in `bytes`; `None` until all of it is there.
///
/// # Errors
/// [`WireError`] as soon as the header is available, so that no receiver waits for, or allocates, a
/// body that will not be read.
pub fn split(bytes: &[u8]) -> Result<Option<RawFrame<'_>>, WireError> {
    split_within(bytes, BODY_BYTES_MAX)
}

/// As [`split`], for a body of at most `body_bytes_max` bytes.
///
/// # Errors
/// As [`split`].
pub fn split_within(
    bytes: &[u8],
    body_bytes_max: usize,
) -> Result<Option<RawFrame<'_>>, WireError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let &[l0, l1, l2, l3, version, kind, z0, z1] = header;
    if version != VERSION {
        return Err(WireError::Version(version));
    }
    let kind = FrameKind::of(kind).ok_or(WireError::Kind(kind))?;
    let zero = u16::from_le_bytes([z0, z1]);
    if zero != 0 {
        return Err(WireError::Reserved(zero));
    }
    let len = u32::from_le_bytes([l0, l1, l2, l3]);
    if len as usize > body_bytes_max {
        return Err(WireError::Length {
            kind,
            len,
            max: body_bytes_max,
        });
    }
    let body = rest.get(..len as usize);
    Ok(body.map(|body| RawFrame {
        kind,
        body,
        len: HEADER_BYTES + body.len(),
    }))
}

/// Appends a frame to `out`: its header, and the body that `write` appends.
fn frame(out: &mut Vec<u8>, kind: FrameKind, write: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    out.extend_from_slice(&[0, 0, 0, 0, VERSION, kind as u8, 0, 0]);
    write(out);
    let len = to_u32(out.len() - at - HEADER_BYTES);
    out[at..at + 4].copy_from_slice(&len.to_le_bytes());
}

/// Reads the fields of one body.
struct Fields<'a> {
    kind: FrameKind,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn new(kind: FrameKind, body: &'a [u8]) -> Fields<'a> {
        Fields { kind, rest: body }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(WireError::Cut(self.kind))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let taken = self.take(N)?;
        Ok(taken
            .try_into()
            .expect("`take` returns the requested length"))
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    fn u32s(&mut self, count: usize) -> Result<impl Iterator<Item = u32> + 'a, WireError> {
        let bytes = self.take(count.saturating_mul(4))?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)))
    }

    fn u64s(&mut self, count: usize) -> Result<impl Iterator<Item = u64> + 'a, WireError> {
        let bytes = self.take(count.saturating_mul(8))?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)))
    }

    fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.bad(field, other.into())),
        }
    }

    fn text(&mut self, field: &'static str) -> Result<&'a str, WireError> {
        let len = self.u16()?;
        let bytes = self.take(len.into())?;
        std::str::from_utf8(bytes).map_err(|_| self.bad(field, len.into()))
    }

    fn rank(&mut self) -> Result<RankId, WireError> {
        let worker = WorkerId(self.u32()?);
        let dp_rank = self.u16()?;
        Ok(RankId { worker, dp_rank })
    }

    fn addr(&mut self, shard: u8) -> Result<StreamAddr, WireError> {
        let (slot, generation) = (self.u32()?, self.u32()?);
        if slot >= SLOTS_MAX {
            return Err(self.bad("stream slot", slot.into()));
        }
        let stream = StreamId { slot, generation };
        Ok(StreamAddr { shard, stream })
    }

    fn bad(&self, field: &'static str, value: u64) -> WireError {
        let kind = self.kind;
        WireError::Value { kind, field, value }
    }

    fn end(self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(WireError::Trailing {
                kind: self.kind,
                bytes,
            }),
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(usize::from(u16::MAX));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&to_u16(end).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

fn put_rank(out: &mut Vec<u8>, rank: RankId) {
    out.extend_from_slice(&rank.worker.0.to_le_bytes());
    out.extend_from_slice(&rank.dp_rank.to_le_bytes());
}

fn put_stream(out: &mut Vec<u8>, stream: StreamId) {
    out.extend_from_slice(&stream.slot.to_le_bytes());
    out.extend_from_slice(&stream.generation.to_le_bytes());
}

fn put_words(out: &mut Vec<u8>, words: &[u32]) {
    let at = out.len();
    out.resize(at + words.len() * 4, 0);
    let (chunks, _) = out[at..].as_chunks_mut::<4>();
    for (chunk, word) in chunks.iter_mut().zip(words) {
        *chunk = word.to_le_bytes();
    }
}

/// One worker of a process, as announced in its [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Its id.
    pub worker: WorkerId,
    /// Its data-parallel ranks, at least one.
    pub ranks: u16,
    /// Whether it accepts requests already.
    pub ready: bool,
}

/// The first frame of a worker process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Drawn at the start of the process: another run is another instance.
    pub instance: u64,
    /// Fingerprint of the cluster as this process knows it; both sides must have the same.
    pub fingerprint: u64,
    /// The shard that it means to connect to.
    pub shard: u8,
    /// A peer that was silent for this long counts as gone, ms.
    pub deadline_ms: u32,
    /// Identifies the clock of its times ([`crate::clock::clock_id`]): those of another host's clock
    /// are not comparable.
    pub clock: u64,
    /// For people: host and process.
    pub name: String,
    /// Its workers.
    pub workers: Vec<Announced>,
    /// From the frontend's record ([`crate::discovery::SeatKey`]): only processes that can read the discovery
    /// directory know it.
    pub key: [u8; 16],
}

impl Hello {
    /// Longest body for a cluster of `workers` workers, bytes. A shard reads no more of a peer that it does not
    /// know yet.
    pub fn bytes_max(workers: usize) -> usize {
        /// All but the workers, with a name of up to 4 KiB.
        const FIXED: usize = 4160;
        FIXED + 7 * workers
    }

    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Hello, |out| {
            out.extend_from_slice(&MAGIC.to_le_bytes());
            out.extend_from_slice(&self.instance.to_le_bytes());
            out.extend_from_slice(&self.fingerprint.to_le_bytes());
            out.push(self.shard);
            out.extend_from_slice(&self.deadline_ms.to_le_bytes());
            out.extend_from_slice(&self.clock.to_le_bytes());
            put_text(out, &self.name);
            out.extend_from_slice(&to_u16(self.workers.len()).to_le_bytes());
            for announced in &self.workers {
                out.extend_from_slice(&announced.worker.0.to_le_bytes());
                out.extend_from_slice(&announced.ranks.to_le_bytes());
                out.push(announced.ready.into());
            }
            out.extend_from_slice(&self.key);
        });
    }

    /// Reads a body.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(body: &[u8]) -> Result<Hello, WireError> {
        let mut fields = Fields::new(FrameKind::Hello, body);
        let magic = fields.u32()?;
        if magic != MAGIC {
            return Err(fields.bad("magic", magic.into()));
        }
        let (instance, fingerprint) = (fields.u64()?, fields.u64()?);
        let (shard, deadline_ms) = (fields.u8()?, fields.u32()?);
        let clock = fields.u64()?;
        let name = fields.text("name")?.to_owned();
        let count = usize::from(fields.u16()?);
        if count == 0 || count > WORKERS_MAX {
            return Err(fields.bad("count of workers", count as u64));
        }
        let mut workers = Vec::new();
        for _ in 0..count {
            let worker = WorkerId(fields.u32()?);
            let ranks = fields.u16()?;
            let ready = fields.flag("readiness")?;
            if ranks == 0 {
                return Err(fields.bad("count of ranks", 0));
            }
            workers.push(Announced {
                worker,
                ranks,
                ready,
            });
        }
        let key = fields.array()?;
        fields.end()?;
        Ok(Hello {
            instance,
            fingerprint,
            shard,
            deadline_ms,
            clock,
            name,
            workers,
            key,
        })
    }
}

/// A shard's answer to a worker process that it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The frontend's run.
    pub instance: u64,
    /// The shard.
    pub shard: u8,
    /// Whether KV deltas are wanted here: one shard of a frontend feeds the index of all.
    pub wants_kv: bool,
    /// A peer that was silent for this long counts as gone, ms.
    pub deadline_ms: u32,
    /// For people: host and process.
    pub name: String,
}

impl Welcome {
    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Welcome, |out| {
            out.extend_from_slice(&MAGIC.to_le_bytes());
            out.extend_from_slice(&self.instance.to_le_bytes());
            out.push(self.shard);
            out.push(self.wants_kv.into());
            out.extend_from_slice(&self.deadline_ms.to_le_bytes());
            put_text(out, &self.name);
        });
    }

    /// Reads a body.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(body: &[u8]) -> Result<Welcome, WireError> {
        let mut fields = Fields::new(FrameKind::Welcome, body);
        let magic = fields.u32()?;
        if magic != MAGIC {
            return Err(fields.bad("magic", magic.into()));
        }
        let welcome = Welcome {
            instance: fields.u64()?,
            shard: fields.u8()?,
            wants_kv: fields.flag("wish for KV deltas")?,
            deadline_ms: fields.u32()?,
            name: fields.text("name")?.to_owned(),
        };
        fields.end()?;
        Ok(welcome)
    }
}

/// Why a shard rejects a worker process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RejectReason {
    /// It uses another protocol.
    Protocol = 1,
    /// It has another cluster file.
    Cluster = 2,
    /// Another instance runs one of its workers.
    WorkerTaken = 3,
    /// It meant another shard: the address has a new owner.
    WrongShard = 4,
    /// The frontend is shutting down, or full.
    Unavailable = 5,
    /// It does not know the key in the frontend's record.
    Key = 6,
}

impl RejectReason {
    /// All reasons.
    pub const ALL: [RejectReason; 6] = [
        RejectReason::Protocol,
        RejectReason::Cluster,
        RejectReason::WorkerTaken,
        RejectReason::WrongShard,
        RejectReason::Unavailable,
        RejectReason::Key,
    ];
}

/// A shard's answer to a worker process that it rejects.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Reject {
    /// The reason, as a code.
    pub reason: RejectReason,
    /// For people: the error, its place, the remedy.
    pub message: String,
}

impl Reject {
    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Reject, |out| {
            out.extend_from_slice(&(self.reason as u16).to_le_bytes());
            put_text(out, &self.message);
        });
    }

    /// Reads a body.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(body: &[u8]) -> Result<Reject, WireError> {
        let mut fields = Fields::new(FrameKind::Reject, body);
        let code = fields.u16()?;
        let reason = RejectReason::ALL
            .into_iter()
            .find(|&reason| reason as u16 == code)
            .ok_or_else(|| fields.bad("reason", code.into()))?;
        let message = fields.text("message")?.to_owned();
        fields.end()?;
        Ok(Reject { reason, message })
    }
}

/// Appends a frame without a body.
pub fn encode_bare(kind: FrameKind, out: &mut Vec<u8>) {
    debug_assert!(matches!(kind, FrameKind::Ping | FrameKind::Bye));
    frame(out, kind, |_| {});
}

/// Flags of a start.
mod start_flag {
    pub(super) const TRACED: u8 = 1;
    pub(super) const IGNORE_EOS: u8 = 2;
    /// The tail is an id, not tokens.
    pub(super) const OPAQUE: u8 = 4;
    /// The tokens of the full blocks follow, too.
    pub(super) const BLOCK_TOKENS: u8 = 8;
    /// More input follows.
    pub(super) const MORE: u8 = 16;
    /// The prompt alone.
    pub(super) const PROMPT: u8 = 32;
    /// The answer alone.
    pub(super) const ANSWER: u8 = 64;
    /// The number of a LoRA adapter follows.
    pub(super) const ADAPTER: u8 = 128;
    /// At most one of these is set.
    pub(super) const APART: u8 = PROMPT | ANSWER | MORE;
}

/// Flags of an input.
mod input_flag {
    pub(super) const ENDS_TURN: u8 = 1;
    pub(super) const LAST: u8 = 2;
    pub(super) const ALL: u8 = 3;
}

/// Appends a request or control. The shard of its address is not encoded: the connection belongs to
/// one.
pub fn encode_to_worker(message: &ToWorker, out: &mut Vec<u8>) {
    let control = |out: &mut Vec<u8>, kind, rank: RankId, addr: &StreamAddr, bytes: Option<u32>| {
        frame(out, kind, |out| {
            put_stream(out, addr.stream);
            put_rank(out, rank);
            if let Some(bytes) = bytes {
                out.extend_from_slice(&bytes.to_le_bytes());
            }
        });
    };
    match message {
        ToWorker::Start(start) => encode_start(start, out),
        ToWorker::Stop { rank, addr } => control(out, FrameKind::Stop, *rank, addr, None),
        ToWorker::Kill { rank, addr } => control(out, FrameKind::Kill, *rank, addr, None),
        ToWorker::Receive { rank, addr } => control(out, FrameKind::Receive, *rank, addr, None),
        ToWorker::Release { rank, addr } => control(out, FrameKind::Release, *rank, addr, None),
        ToWorker::Credit { rank, addr, bytes } => {
            control(out, FrameKind::Credit, *rank, addr, Some(*bytes));
        }
        ToWorker::Resync { rank } => frame(out, FrameKind::Resync, |out| put_rank(out, *rank)),
        ToWorker::Input(input) => frame(out, FrameKind::Input, |out| {
            put_stream(out, input.addr.stream);
            put_rank(out, input.rank);
            let mut flags = 0;
            if input.ends_turn {
                flags |= input_flag::ENDS_TURN;
            }
            if input.last {
                flags |= input_flag::LAST;
            }
            out.push(flags);
            out.extend_from_slice(&to_u32(input.tokens.len()).to_le_bytes());
            put_words(out, &input.tokens);
        }),
        // It means that the connection is gone, so it never crosses one.
        ToWorker::HangUp { .. } => debug_assert!(false, "a hang-up stays in its process"),
    }
}

/// Appends a new stream, as [`encode_to_worker`] does.
pub fn encode_start(start: &StartRequest, out: &mut Vec<u8>) {
    let request = &start.request;
    let prompt = &request.prompt;
    frame(out, FrameKind::Start, |out| {
        put_stream(out, start.addr.stream);
        put_rank(out, start.rank);
        let mut flags = 0;
        if start.traced {
            flags |= start_flag::TRACED;
        }
        if request.params.ignore_eos {
            flags |= start_flag::IGNORE_EOS;
        }
        if matches!(prompt.tail(), Tail::Opaque { .. }) {
            flags |= start_flag::OPAQUE;
        }
        if start.more {
            flags |= start_flag::MORE;
        }
        if request.params.adapter != 0 {
            flags |= start_flag::ADAPTER;
        }
        // Tokens of blocks are useless without those of the tail.
        let tokens = prompt
            .block_tokens()
            .filter(|_| flags & start_flag::OPAQUE == 0);
        if tokens.is_some() {
            flags |= start_flag::BLOCK_TOKENS;
        }
        flags |= match start.role {
            Role::Both => 0,
            Role::Prefill => start_flag::PROMPT,
            Role::Decode => start_flag::ANSWER,
        };
        out.push(flags);
        out.push(start.attempt);
        out.extend_from_slice(&start.dispatched_ns.to_le_bytes());
        out.extend_from_slice(&start.credit_bytes.to_le_bytes());
        out.extend_from_slice(&request.seed.to_le_bytes());
        out.extend_from_slice(&request.priority.to_le_bytes());
        out.extend_from_slice(&request.params.max_tokens.to_le_bytes());
        out.extend_from_slice(&request.params.min_tokens.to_le_bytes());
        out.extend_from_slice(&request.params.answered.to_le_bytes());
        if request.params.adapter != 0 {
            out.extend_from_slice(&request.params.adapter.to_le_bytes());
        }
        let stops = &request.params.stop_token_ids;
        out.extend_from_slice(&to_u32(stops.len()).to_le_bytes());
        put_words(out, stops);
        out.extend_from_slice(&prompt.len().to_le_bytes());
        out.extend_from_slice(&prompt.block_size().to_le_bytes());
        out.extend_from_slice(&prompt.root().0.to_le_bytes());
        for block in prompt.blocks() {
            out.extend_from_slice(&block.0.to_le_bytes());
        }
        if let Some(tokens) = tokens {
            put_words(out, tokens);
        }
        match prompt.tail() {
            Tail::Tokens(tokens) => put_words(out, tokens),
            Tail::Opaque { id } => out.extend_from_slice(&id.to_le_bytes()),
        }
    });
}

/// Reads a request or control from the connection of shard `shard`.
///
/// # Errors
/// [`WireError`]; [`WireError::Place`] for a frame that is neither.
pub fn decode_to_worker(kind: FrameKind, body: &[u8], shard: u8) -> Result<ToWorker, WireError> {
    let mut fields = Fields::new(kind, body);
    let message = match kind {
        FrameKind::Start => ToWorker::Start(Box::new(decode_start(&mut fields, shard)?)),
        FrameKind::Stop
        | FrameKind::Kill
        | FrameKind::Receive
        | FrameKind::Release
        | FrameKind::Credit => {
            let addr = fields.addr(shard)?;
            let rank = fields.rank()?;
            match kind {
                FrameKind::Stop => ToWorker::Stop { rank, addr },
                FrameKind::Kill => ToWorker::Kill { rank, addr },
                FrameKind::Receive => ToWorker::Receive { rank, addr },
                FrameKind::Release => ToWorker::Release { rank, addr },
                _ => ToWorker::Credit {
                    rank,
                    addr,
                    bytes: fields.u32()?,
                },
            }
        }
        FrameKind::Resync => ToWorker::Resync {
            rank: fields.rank()?,
        },
        FrameKind::Input => {
            let addr = fields.addr(shard)?;
            let rank = fields.rank()?;
            let flags = fields.u8()?;
            if flags & !input_flag::ALL != 0 {
                return Err(fields.bad("flags", flags.into()));
            }
            let count = fields.u32()? as usize;
            ToWorker::Input(Box::new(Input {
                rank,
                addr,
                tokens: fields.u32s(count)?.collect(),
                ends_turn: flags & input_flag::ENDS_TURN != 0,
                last: flags & input_flag::LAST != 0,
            }))
        }
        kind => {
            let place = "among requests to a worker";
            return Err(WireError::Place { kind, place });
        }
    };
    fields.end()?;
    Ok(message)
}

fn decode_start(fields: &mut Fields<'_>, shard: u8) -> Result<StartRequest, WireError> {
    let addr = fields.addr(shard)?;
    let rank = fields.rank()?;
    let flags = fields.u8()?;
    let both = start_flag::OPAQUE | start_flag::BLOCK_TOKENS;
    let opaque_more = start_flag::OPAQUE | start_flag::MORE;
    let apart = (flags & start_flag::APART).count_ones();
    if flags & both == both || flags & opaque_more == opaque_more || apart > 1 {
        return Err(fields.bad("flags", flags.into()));
    }
    let attempt = fields.u8()?;
    let role = match flags & (start_flag::PROMPT | start_flag::ANSWER) {
        start_flag::PROMPT => Role::Prefill,
        start_flag::ANSWER => Role::Decode,
        _ => Role::Both,
    };
    let dispatched_ns = fields.u64()?;
    let credit_bytes = fields.u32()?;
    let more = flags & start_flag::MORE != 0;
    if more && credit_bytes != NO_LIMIT {
        return Err(fields.bad(
            "credit of a stream whose input goes on",
            credit_bytes.into(),
        ));
    }
    let seed = fields.u64()?;
    let priority = fields.u32()?.cast_signed();
    let (max_tokens, min_tokens) = (fields.u32()?, fields.u32()?);
    if max_tokens == 0 {
        return Err(fields.bad("max_tokens", 0));
    }
    let answered = fields.u32()?;
    if answered >= max_tokens || more && answered != 0 {
        return Err(fields.bad("count of answered tokens", answered.into()));
    }
    let adapter = if flags & start_flag::ADAPTER == 0 {
        0
    } else {
        fields.u64()?
    };
    let stop_count = fields.u32()? as usize;
    let stop_token_ids = fields.u32s(stop_count)?.collect();
    let (len, block_size) = (fields.u32()?, fields.u32()?);
    let root = BlockHash(fields.u64()?);
    if block_size == 0 {
        return Err(fields.bad("block size", 0));
    }
    let blocks = fields
        .u64s((len / block_size) as usize)?
        .map(BlockHash)
        .collect();
    let block_tokens: Option<Vec<u32>> = if flags & start_flag::BLOCK_TOKENS == 0 {
        None
    } else {
        Some(fields.u32s((len - len % block_size) as usize)?.collect())
    };
    let tail = if flags & start_flag::OPAQUE == 0 {
        Tail::Tokens(fields.u32s((len % block_size) as usize)?.collect())
    } else {
        Tail::Opaque { id: fields.u64()? }
    };
    let whole = block_tokens.map(|mut tokens| {
        if let Tail::Tokens(tail) = &tail {
            tokens.extend_from_slice(tail);
        }
        tokens
    });
    let mut prompt = Prompt::from_parts(len, block_size, blocks, tail)
        .map_err(|_| fields.bad("prompt length", len.into()))?
        .with_root(root);
    if let Some(tokens) = whole {
        prompt = prompt
            .with_block_tokens(&tokens)
            .map_err(|_| fields.bad("count of tokens", tokens.len() as u64))?;
    }
    Ok(StartRequest {
        addr,
        rank,
        request: EngineRequest {
            id: RequestId::from(addr),
            prompt,
            params: GenerationParams {
                max_tokens,
                min_tokens,
                ignore_eos: flags & start_flag::IGNORE_EOS != 0,
                stop_token_ids,
                answered,
                adapter,
                // Their time is modelled in simulation.
                encoder_inputs: [].into(),
            },
            priority,
            seed,
        },
        dispatched_ns,
        credit_bytes,
        traced: flags & start_flag::TRACED != 0,
        more,
        role,
        attempt,
    })
}

/// Appends a pass.
pub fn encode_pass(pass: &PassFrame, out: &mut Vec<u8>) {
    let (words, text) = pass.parts();
    out.reserve(HEADER_BYTES + 16 + words.len() * 4 + text.len());
    frame(out, FrameKind::Pass, |out| {
        out.extend_from_slice(&pass.sent_ns.to_le_bytes());
        out.extend_from_slice(&to_u32(words.len()).to_le_bytes());
        out.extend_from_slice(&to_u32(text.len()).to_le_bytes());
        put_words(out, words);
        out.extend_from_slice(text.as_bytes());
    });
}

/// Reads a pass into `pass`, whose memory is reused.
///
/// # Errors
/// [`WireError`]; `pass` is empty then.
pub fn decode_pass(body: &[u8], pass: &mut PassFrame) -> Result<(), WireError> {
    let mut fields = Fields::new(FrameKind::Pass, body);
    let sent_ns = fields.u64()?;
    let (words, text) = (fields.u32()? as usize, fields.u32()? as usize);
    let words = fields.u32s(words)?;
    let bytes = fields.take(text)?;
    let text = std::str::from_utf8(bytes).map_err(|_| fields.bad("text", text as u64))?;
    fields.end()?;
    pass.refill(words, text, sent_ns)?;
    Ok(())
}

/// Runs of changes in a KV frame.
mod run {
    /// Blocks stored, each with the previous one as its parent; the first one's parent is encoded.
    pub(super) const STORED: u32 = 1;
    pub(super) const REMOVED: u32 = 2;
    pub(super) const CLEARED: u32 = 3;
}

/// Appends a delta, or a snapshot. A chain of blocks takes 8 bytes per block: a run has its first
/// parent, and each block is the parent of the next.
pub fn encode_kv(delta: &KvDelta, snapshot: bool, out: &mut Vec<u8>) {
    let kind = if snapshot {
        FrameKind::KvSnapshot
    } else {
        FrameKind::Kv
    };
    frame(out, kind, |out| {
        put_rank(out, delta.rank);
        out.extend_from_slice(&delta.sequence.to_le_bytes());
        let ops = &delta.ops;
        let mut at = 0;
        while at < ops.len() {
            let len = run_len(&ops[at..]);
            let run = &ops[at..at + len];
            at += len;
            let kind = match run[0] {
                KvOp::Stored { .. } => run::STORED,
                KvOp::Removed { .. } => run::REMOVED,
                KvOp::Cleared => run::CLEARED,
            };
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(&to_u32(len).to_le_bytes());
            if let KvOp::Stored { parent, .. } = run[0] {
                out.extend_from_slice(&parent.0.to_le_bytes());
            }
            for op in run {
                if let KvOp::Stored { hash, .. } | KvOp::Removed { hash } = op {
                    out.extend_from_slice(&hash.0.to_le_bytes());
                }
            }
        }
    });
}

/// Length of the first run in `ops`; at least one.
fn run_len(ops: &[KvOp]) -> usize {
    let follows = |pair: &[KvOp]| match (pair[0], pair[1]) {
        (KvOp::Stored { hash, .. }, KvOp::Stored { parent, .. }) => hash == parent,
        (KvOp::Removed { .. }, KvOp::Removed { .. }) | (KvOp::Cleared, KvOp::Cleared) => true,
        _ => false,
    };
    1 + ops.windows(2).take_while(|pair| follows(pair)).count()
}

/// Reads a delta or a snapshot into `delta`, whose memory is reused. Returns whether it is a
/// snapshot.
///
/// # Errors
/// [`WireError`].
pub fn decode_kv(kind: FrameKind, body: &[u8], delta: &mut KvDelta) -> Result<bool, WireError> {
    let mut fields = Fields::new(kind, body);
    delta.ops.clear();
    delta.rank = fields.rank()?;
    delta.sequence = fields.u64()?;
    while !fields.rest.is_empty() {
        let (run, len) = (fields.u32()?, fields.u32()? as usize);
        if len == 0 {
            return Err(fields.bad("run of no changes", run.into()));
        }
        match run {
            run::STORED => {
                let mut parent = BlockHash(fields.u64()?);
                delta.ops.extend(fields.u64s(len)?.map(|hash| {
                    let stored = KvOp::Stored {
                        hash: BlockHash(hash),
                        parent,
                    };
                    parent = BlockHash(hash);
                    stored
                }));
            }
            run::REMOVED => delta
                .ops
                .extend(fields.u64s(len)?.map(|hash| KvOp::Removed {
                    hash: BlockHash(hash),
                })),
            // Repeated clears are one clear: the count is ignored, and must not cost memory.
            run::CLEARED => delta.ops.push(KvOp::Cleared),
            other => return Err(fields.bad("run of changes", other.into())),
        }
    }
    Ok(kind == FrameKind::KvSnapshot)
}

/// Appends whether `worker` accepts requests.
pub fn encode_ready(worker: WorkerId, ready: bool, out: &mut Vec<u8>) {
    frame(out, FrameKind::Ready, |out| {
        out.extend_from_slice(&worker.0.to_le_bytes());
        out.push(ready.into());
    });
}

/// Reads a worker, and whether it accepts requests.
///
/// # Errors
/// [`WireError`].
pub fn decode_ready(body: &[u8]) -> Result<(WorkerId, bool), WireError> {
    let mut fields = Fields::new(FrameKind::Ready, body);
    let worker = WorkerId(fields.u32()?);
    let ready = fields.flag("readiness")?;
    fields.end()?;
    Ok((worker, ready))
}

/// The load of a rank, as its process sees it: the sum over all frontends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankLoad {
    /// The rank.
    pub rank: RankId,
    /// Sequences running.
    pub running: u32,
    /// Sequences waiting.
    pub waiting: u32,
    /// Blocks held by sequences.
    pub used_blocks: u32,
    /// Blocks in all.
    pub total_blocks: u32,
}

/// Appends the loads of ranks.
pub fn encode_loads(loads: &[RankLoad], out: &mut Vec<u8>) {
    frame(out, FrameKind::Load, |out| {
        for load in loads {
            put_rank(out, load.rank);
            put_words(
                out,
                &[
                    load.running,
                    load.waiting,
                    load.used_blocks,
                    load.total_blocks,
                ],
            );
        }
    });
}

/// Reads the loads of ranks.
///
/// # Errors
/// [`WireError`].
pub fn decode_loads(body: &[u8], mut each: impl FnMut(RankLoad)) -> Result<(), WireError> {
    let mut fields = Fields::new(FrameKind::Load, body);
    while !fields.rest.is_empty() {
        each(RankLoad {
            rank: fields.rank()?,
            running: fields.u32()?,
            waiting: fields.u32()?,
            used_blocks: fields.u32()?,
            total_blocks: fields.u32()?,
        });
    }
    Ok(())
}

/// A deadline as greetings have it, ms; one beyond 49 days is sent as that.
pub fn deadline_ms(deadline: Duration) -> u32 {
    u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use slipstream_base::FinishReason;

    use super::*;
    use crate::frame::{End, Entry, FirstPass, Prologue, RefusalReason, Reserved, Usage};

    const RANK: RankId = RankId {
        worker: WorkerId(3),
        dp_rank: 1,
    };

    fn addr(shard: u8) -> StreamAddr {
        StreamAddr {
            shard,
            stream: StreamId {
                slot: 0x0001_0203,
                generation: 0x0a0b_0c0d,
            },
        }
    }

    #[test]
    fn a_deadline_of_months_is_not_sent_as_a_short_one() {
        assert_eq!(deadline_ms(Duration::from_millis(2_500)), 2_500);
        // 2^32 ms and one second more.
        assert_eq!(
            deadline_ms(Duration::from_millis((1 << 32) + 1_000)),
            u32::MAX
        );
    }

    fn hello() -> Hello {
        Hello {
            instance: 0x1122_3344_5566_7788,
            fingerprint: 0x99aa_bbcc_ddee_ff00,
            shard: 1,
            deadline_ms: 5000,
            clock: 0x0123_4567_89ab_cdef,
            name: "host:42".into(),
            workers: vec![
                Announced {
                    worker: WorkerId(3),
                    ranks: 2,
                    ready: true,
                },
                Announced {
                    worker: WorkerId(4),
                    ranks: 1,
                    ready: false,
                },
            ],
            key: *b"a key of a seat.",
        }
    }

    fn welcome() -> Welcome {
        Welcome {
            instance: 0x0102_0304_0506_0708,
            shard: 1,
            wants_kv: false,
            deadline_ms: 5000,
            name: "host:7".into(),
        }
    }

    fn reject() -> Reject {
        Reject {
            reason: RejectReason::WorkerTaken,
            message: "w3 is taken".into(),
        }
    }

    fn start_with_tokens() -> StartRequest {
        let mut start = start(false);
        let prompt = start.request.prompt.clone();
        start.request.prompt = prompt.with_block_tokens(&[73, 74, 75, 76, 77]).unwrap();
        start
    }

    fn start(opaque: bool) -> StartRequest {
        let prompt = if opaque {
            let blocks = [BlockHash(1)].into();
            Prompt::from_parts(17, 16, blocks, Tail::Opaque { id: 99 }).unwrap()
        } else {
            let blocks = [BlockHash(0x0101), BlockHash(0x0202)].into();
            Prompt::from_parts(5, 2, blocks, Tail::Tokens([77].into()))
                .unwrap()
                .with_root(BlockHash(0x0404))
        };
        StartRequest {
            addr: addr(0),
            rank: RANK,
            request: EngineRequest {
                id: RequestId::from(addr(0)),
                prompt,
                params: GenerationParams {
                    max_tokens: 32,
                    min_tokens: 1,
                    ignore_eos: true,
                    stop_token_ids: [7, 8].into(),
                    answered: if opaque { 31 } else { 0 },
                    ..GenerationParams::default()
                },
                priority: -1,
                seed: 0xfeed,
            },
            dispatched_ns: 1_000_000,
            credit_bytes: 262_144,
            traced: !opaque,
            more: false,
            role: Role::Both,
            attempt: 0,
        }
    }

    fn start_of_adapter() -> StartRequest {
        let mut start = start(false);
        start.request.params.adapter = 0x0909;
        start
    }

    fn input() -> Input {
        Input {
            rank: RANK,
            addr: addr(0),
            tokens: [81, 82].into(),
            ends_turn: true,
            last: false,
        }
    }

    fn start_with_more() -> StartRequest {
        StartRequest {
            credit_bytes: NO_LIMIT,
            more: true,
            ..start(false)
        }
    }

    fn start_as(role: Role) -> StartRequest {
        StartRequest {
            role,
            attempt: u8::from(role == Role::Decode),
            ..start(false)
        }
    }

    fn pass() -> PassFrame {
        let stream = |slot| StreamId {
            slot,
            generation: 9,
        };
        let mut pass = PassFrame::new();
        let prologue = Prologue {
            hit_tokens: 16,
            worker_recv_ns: Some(1),
            admitted_ns: Some(2),
        };
        pass.push_prologue(stream(1), &prologue);
        let first = FirstPass {
            start_ns: 3,
            end_ns: 4,
        };
        pass.push_tokens(stream(1), &[101], Some(first));
        pass.push_tokens(stream(2), &[102], None);
        pass.push_tokens(stream(3), &[103, 104], None);
        pass.push_refused(stream(4), 1, RefusalReason::Busy, "full");
        let usage = Usage {
            prompt_tokens: 20,
            completion_tokens: 2,
            cached_tokens: 16,
            preemptions: 0,
        };
        let end = End {
            reason: FinishReason::Length,
            usage,
        };
        pass.push_end(stream(2), &end);
        pass.push_turn(stream(5), &end);
        pass.push_room(stream(5), 65_536);
        pass.push_computed(stream(6), first);
        let reserved = Reserved {
            attempt: 1,
            cached_tokens: 16,
            worker_recv_ns: Some(1),
            at_ns: Some(2),
        };
        pass.push_reserved(stream(7), &reserved);
        pass.sent_ns = 5;
        pass
    }

    fn delta() -> KvDelta {
        let stored = |hash, parent| KvOp::Stored {
            hash: BlockHash(hash),
            parent: BlockHash(parent),
        };
        KvDelta {
            rank: RANK,
            sequence: 6,
            ops: vec![
                KvOp::Cleared,
                stored(0x11, 0x10),
                stored(0x12, 0x11),
                KvOp::Removed {
                    hash: BlockHash(0x12),
                },
            ],
        }
    }

    fn load() -> RankLoad {
        RankLoad {
            rank: RANK,
            running: 2,
            waiting: 1,
            used_blocks: 40,
            total_blocks: 1024,
        }
    }

    fn encoded(encode: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&mut out);
        out
    }

    fn to_worker(message: &ToWorker) -> Vec<u8> {
        encoded(|out| encode_to_worker(message, out))
    }

    /// One frame of each kind, some of two, by its name in `docs/wire.md`.
    fn samples() -> BTreeMap<&'static str, Vec<u8>> {
        let (rank, addr) = (RANK, addr(0));
        let start = |opaque| to_worker(&ToWorker::Start(Box::new(start(opaque))));
        BTreeMap::from([
            ("hello", encoded(|out| hello().encode(out))),
            ("welcome", encoded(|out| welcome().encode(out))),
            ("reject", encoded(|out| reject().encode(out))),
            ("ping", encoded(|out| encode_bare(FrameKind::Ping, out))),
            ("bye", encoded(|out| encode_bare(FrameKind::Bye, out))),
            ("start", start(false)),
            ("start-opaque", start(true)),
            (
                "start-tokens",
                to_worker(&ToWorker::Start(Box::new(start_with_tokens()))),
            ),
            (
                "start-more",
                to_worker(&ToWorker::Start(Box::new(start_with_more()))),
            ),
            (
                "start-adapter",
                to_worker(&ToWorker::Start(Box::new(start_of_adapter()))),
            ),
            (
                "start-prompt",
                to_worker(&ToWorker::Start(Box::new(start_as(Role::Prefill)))),
            ),
            (
                "start-answer",
                to_worker(&ToWorker::Start(Box::new(start_as(Role::Decode)))),
            ),
            ("receive", to_worker(&ToWorker::Receive { rank, addr })),
            ("release", to_worker(&ToWorker::Release { rank, addr })),
            ("input", to_worker(&ToWorker::Input(Box::new(input())))),
            ("stop", to_worker(&ToWorker::Stop { rank, addr })),
            ("kill", to_worker(&ToWorker::Kill { rank, addr })),
            ("resync", to_worker(&ToWorker::Resync { rank })),
            (
                "credit",
                to_worker(&ToWorker::Credit {
                    rank,
                    addr,
                    bytes: 4096,
                }),
            ),
            ("pass", encoded(|out| encode_pass(&pass(), out))),
            ("kv", encoded(|out| encode_kv(&delta(), false, out))),
            ("kv-snapshot", encoded(|out| encode_kv(&delta(), true, out))),
            ("ready", encoded(|out| encode_ready(WorkerId(3), true, out))),
            ("load", encoded(|out| encode_loads(&[load()], out))),
        ])
    }

    /// The blocks ` ```hex NAME ` of the document; text after `#` in a line is for people.
    fn documented() -> BTreeMap<&'static str, Vec<u8>> {
        let text = include_str!("../../../../docs/wire.md");
        let mut found = BTreeMap::new();
        for block in text.split("```hex ").skip(1) {
            let (name, rest) = block.split_once('\n').expect("a name, then bytes");
            let (hex, _) = rest.split_once("```").expect("the block ends");
            let digits: String = hex
                .lines()
                .flat_map(|line| line.split('#').next().unwrap_or_default().chars())
                .filter(|c| !c.is_whitespace())
                .collect();
            let bytes = digits.as_bytes().chunks(2).map(|pair| {
                let pair = std::str::from_utf8(pair).unwrap();
                u8::from_str_radix(pair, 16).unwrap_or_else(|_| panic!("{name}: {pair}"))
            });
            let twice = found.insert(name, bytes.collect());
            assert!(twice.is_none(), "{name} is shown once");
        }
        found
    }

    #[test]
    fn the_document_shows_every_frame_byte_by_byte() {
        let documented = documented();
        for (name, bytes) in &samples() {
            let hex: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(
                documented.get(name),
                Some(bytes),
                "docs/wire.md does not show {name} as it is: {}",
                hex.join(" ")
            );
        }
        assert_eq!(documented.len(), samples().len(), "and no other");
        let kinds: Vec<FrameKind> = samples()
            .values()
            .map(|bytes| split(bytes).unwrap().unwrap().kind)
            .collect();
        assert!(FrameKind::ALL.iter().all(|kind| kinds.contains(kind)));
    }

    fn body(bytes: &[u8]) -> &[u8] {
        split(bytes).unwrap().unwrap().body
    }

    #[test]
    fn what_goes_in_comes_out() {
        let samples = samples();
        assert_eq!(Hello::decode(body(&samples["hello"])), Ok(hello()));
        assert_eq!(Welcome::decode(body(&samples["welcome"])), Ok(welcome()));
        assert_eq!(Reject::decode(body(&samples["reject"])), Ok(reject()));
        for (name, sent) in [
            ("start", start(false)),
            ("start-opaque", start(true)),
            ("start-tokens", start_with_tokens()),
            ("start-more", start_with_more()),
            ("start-adapter", start_of_adapter()),
            ("start-prompt", start_as(Role::Prefill)),
            ("start-answer", start_as(Role::Decode)),
        ] {
            let read = decode_to_worker(FrameKind::Start, body(&samples[name]), 5).unwrap();
            let ToWorker::Start(read) = read else {
                panic!("{read:?} is no start");
            };
            assert_eq!(read.addr, addr(5), "the connection says which shard");
            let mut request = read.request.clone();
            assert_eq!(request.id, RequestId::from(addr(5)));
            request.id = sent.request.id;
            assert_eq!(request, sent.request);
            assert_eq!((read.rank, read.traced), (sent.rank, sent.traced));
            let of = |start: &StartRequest| (start.more, start.role, start.attempt);
            assert_eq!(of(&read), of(&sent));
            assert_eq!(read.dispatched_ns, sent.dispatched_ns);
            assert_eq!(read.credit_bytes, sent.credit_bytes);
        }
        let read = decode_to_worker(FrameKind::Input, body(&samples["input"]), 0);
        assert!(matches!(read, Ok(ToWorker::Input(read)) if *read == input()));
        let mut read = PassFrame::new();
        decode_pass(body(&samples["pass"]), &mut read).unwrap();
        assert_eq!(read, pass());
        for (name, kind, snapshot) in [
            ("kv", FrameKind::Kv, false),
            ("kv-snapshot", FrameKind::KvSnapshot, true),
        ] {
            let mut read = KvDelta::default();
            assert_eq!(
                decode_kv(kind, body(&samples[name]), &mut read),
                Ok(snapshot)
            );
            assert_eq!(read, delta());
        }
        assert_eq!(
            decode_ready(body(&samples["ready"])),
            Ok((WorkerId(3), true))
        );
        let mut loads = Vec::new();
        decode_loads(body(&samples["load"]), |load| loads.push(load)).unwrap();
        assert_eq!(loads, [load()]);
    }

    /// Reads a body as its declared kind.
    fn decode_any(kind: FrameKind, body: &[u8]) -> Result<(), WireError> {
        match kind {
            FrameKind::Hello => Hello::decode(body).map(drop),
            FrameKind::Welcome => Welcome::decode(body).map(drop),
            FrameKind::Reject => Reject::decode(body).map(drop),
            FrameKind::Ping | FrameKind::Bye => Ok(()),
            FrameKind::Start
            | FrameKind::Stop
            | FrameKind::Kill
            | FrameKind::Receive
            | FrameKind::Release
            | FrameKind::Resync
            | FrameKind::Credit
            | FrameKind::Input => decode_to_worker(kind, body, 0).map(drop),
            FrameKind::Pass => {
                let mut pass = PassFrame::new();
                decode_pass(body, &mut pass)?;
                assert_eq!(pass.entries().count(), pass.len() as usize);
                Ok(())
            }
            FrameKind::Kv | FrameKind::KvSnapshot => {
                decode_kv(kind, body, &mut KvDelta::default()).map(drop)
            }
            FrameKind::Ready => decode_ready(body).map(drop),
            FrameKind::Load => decode_loads(body, |_| {}),
        }
    }

    #[test]
    fn a_frame_cut_anywhere_is_not_yet_a_frame_or_no_frame_at_all() {
        for (name, bytes) in samples() {
            for cut in 0..bytes.len() {
                assert_eq!(split(&bytes[..cut]), Ok(None), "{name} cut at {cut}");
            }
            let frame = split(&bytes).unwrap().unwrap();
            assert_eq!(frame.len, bytes.len());
            for cut in 0..frame.body.len() {
                let short = decode_any(frame.kind, &frame.body[..cut]);
                // Frames that are lists may be cut between two items.
                let list = matches!(
                    frame.kind,
                    FrameKind::Kv | FrameKind::KvSnapshot | FrameKind::Load
                );
                assert!(short.is_err() || list, "{name} with {cut} bytes of body");
            }
            if !matches!(frame.kind, FrameKind::Ping | FrameKind::Bye) {
                let long = [frame.body, &[0]].concat();
                assert!(decode_any(frame.kind, &long).is_err(), "{name} and a byte");
            }
        }
    }

    /// The committed corpus (`fuzz/corpus/wire`), on every compiler.
    #[test]
    fn the_corpus_does_no_harm() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fuzz/corpus/wire");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("the corpus is committed") {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            files += 1;
            let mut rest = bytes.as_slice();
            while let Ok(Some(frame)) = split(rest) {
                rest = &rest[frame.len..];
                let _ = decode_any(frame.kind, frame.body);
            }
        }
        assert!(files >= samples().len(), "at least the document's frames");
    }

    #[test]
    fn bad_headers_are_refused_before_their_body_comes() {
        let header = |len: u32, version, kind, zero: u16| {
            let mut bytes = len.to_le_bytes().to_vec();
            bytes.extend([version, kind]);
            bytes.extend(zero.to_le_bytes());
            split(&bytes).unwrap_err()
        };
        assert_eq!(header(0, 9, 1, 0), WireError::Version(9));
        assert_eq!(header(0, VERSION, 99, 0), WireError::Kind(99));
        assert_eq!(header(0, VERSION, 1, 7), WireError::Reserved(7));
        let (kind, len) = (FrameKind::Hello, BODY_BYTES_MAX as u32 + 1);
        let max = BODY_BYTES_MAX;
        let long = WireError::Length { kind, len, max };
        assert_eq!(header(len, VERSION, 1, 0), long);
    }

    #[test]
    fn bad_fields_are_named() {
        let check = |name: &str, at: usize, byte: u8, field: &str| {
            let mut bytes = samples()[name].clone();
            bytes[HEADER_BYTES + at] = byte;
            let frame = split(&bytes).unwrap().unwrap();
            let error = decode_any(frame.kind, frame.body).unwrap_err();
            assert!(error.to_string().contains(field), "{name}: {error}");
        };
        check("hello", 0, b'X', "magic");
        check("welcome", 13, 2, "wish for KV deltas");
        check("reject", 0, 77, "reason");
        check("start", 3, 1, "stream slot");
        check("start", 14, 0xff, "flags");
        check("start-opaque", 14, 12, "flags");
        check("start-prompt", 14, 32 | 64, "flags");
        check("start-more", 14, 16 | 32, "flags");
        check("start", 40, 0, "max_tokens");
        check("start", 68, 0, "block size");
        check("stop", 3, 1, "stream slot");
        check("kv", 14, 9, "run of changes");
        check("ready", 4, 2, "readiness");
        check("pass", 19, 0xee, "kind 238");
    }

    proptest! {
        /// Bytes of any kind either are rejected or can be read to their end, and cost no more
        /// memory than a small multiple of their length.
        #[test]
        fn arbitrary_bytes_do_no_harm(
            kind in prop::sample::select(FrameKind::ALL.to_vec()),
            body in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let _ = decode_any(kind, &body);
            let _ = split(&body);
        }

        /// The same holds for slightly changed frames.
        #[test]
        fn damaged_frames_do_no_harm(
            pick: prop::sample::Index,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        ) {
            let samples: Vec<Vec<u8>> = samples().into_values().collect();
            let mut bytes = samples[pick.index(samples.len())].clone();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if let Ok(Some(frame)) = split(&bytes) {
                let _ = decode_any(frame.kind, frame.body);
            }
        }

        #[test]
        fn any_delta_comes_back_as_it_was(
            ops in prop::collection::vec((0u8..4, 0u64..6, 0u64..6), 0..40),
            snapshot: bool,
        ) {
            let ops: Vec<KvOp> = ops.into_iter().map(|(kind, hash, parent)| match kind {
                0 => KvOp::Cleared,
                1 => KvOp::Removed { hash: BlockHash(hash) },
                _ => KvOp::Stored { hash: BlockHash(hash), parent: BlockHash(parent) },
            }).collect();
            let mut sent = KvDelta { rank: RANK, sequence: 9, ops };
            // Repeated clears are one clear, and sent as one.
            sent.ops.dedup_by(|a, b| matches!((a, b), (KvOp::Cleared, KvOp::Cleared)));
            let bytes = encoded(|out| encode_kv(&sent, snapshot, out));
            let frame = split(&bytes).unwrap().unwrap();
            let mut read = delta(); // memory that was used before
            prop_assert_eq!(decode_kv(frame.kind, frame.body, &mut read), Ok(snapshot));
            prop_assert_eq!(read, sent);
        }
    }

    #[test]
    fn a_token_in_a_pass_takes_twelve_bytes() {
        let mut pass = PassFrame::new();
        for token in 0..1000 {
            pass.push_tokens(addr(0).stream, &[token], None);
        }
        let bytes = encoded(|out| encode_pass(&pass, out));
        assert_eq!(bytes.len(), HEADER_BYTES + 16 + 12_000);
        let mut read = PassFrame::new();
        decode_pass(body(&bytes), &mut read).unwrap();
        assert!(matches!(
            read.entries().last(),
            Some(Entry::Tokens { tokens: &[999], .. })
        ));
    }
}
