//! Blocks that are read out of a peer's memory by NIXL: what is under way, and where it goes.
//!
//! The messages are those of shared memory: the peer pins the blocks that a request names, and this
//! side reads and releases them. But a read cannot be called back, and may end after the deadline of
//! its transfer, when the places that it was for are their caller's again. So reads go to *slots*,
//! staging memory of this side, and a slot is used again when its read has ended, not before. From
//! there blocks are copied to their places, and verified where they are then.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use slipstream_base::SimTime;

use super::conn::{Conn, Piece, Scheme};
use super::run::{CloseReason, Run, TURN_BYTES, place_of};
use super::{FetchError, PeerId};
use crate::arena::Arena;
use crate::copy::copy_hashed;
use crate::nixl::{NixlError, OneSided, Reading, Span, Ticket};
use crate::region::{Lease, Region};
use crate::wire::{Answer, Introduction, Kind, frame};
use crate::{checksum, clock};

/// Bytes of a slot, and so of the longest read: long enough that a read's own cost is small, short
/// enough that one is verified while others are under way.
const SLOT_BYTES: usize = 1 << 20;
/// A peer may have so many parts of the slots: one that does not answer leaves some to others.
const SHARE: usize = 4;
/// The thread looks at reads under way, and lets those of peers go on, at once for as long as it
/// spins, and then at such intervals: short ones end within, and a stuck one does not take a core.
const PAUSE_NS: u64 = 20_000;
/// How long the end of the transport waits for reads to end.
const ENDING_NS: u64 = 100_000_000;

/// How this side reads its peers' memory.
pub(super) struct Pulls {
    // Dropped in this order: what reads ends before the memory does that it reads to or gives away.
    engine: Box<dyn OneSided>,
    slots: Vec<Lease>,
    slots_per_peer: usize,
    reads: Vec<Read>,
    /// Requests with blocks left to read, in turns.
    turns: VecDeque<u64>,
    requests: HashMap<u64, Pull>,
    partners: HashMap<Arc<str>, Partner>,
    introduction: Introduction,
    /// When something last began or ended, and whether peers may be reading.
    moved: SimTime,
    read_by_peers: bool,
    _served: Option<Arc<Arena>>,
}

/// A peer that can be read from, by the name of its agent.
#[derive(Default)]
struct Partner {
    /// Connections; two where each has dialed the other.
    connections: u32,
    reads: usize,
    /// Of reads that failed. Nothing says that their last byte has come, so they are not used again
    /// before NIXL has forgotten the peer.
    spoilt: Vec<Lease>,
}

/// A request that the peer has answered.
struct Pull {
    peer: PeerId,
    agent: Arc<str>,
    parts: VecDeque<Part>,
    /// Bytes that are missing of each block, and its checksum.
    blocks: Vec<(usize, u64)>,
    reads: usize,
}

/// A block, or as much of it as a slot has room for.
struct Part {
    block: usize,
    /// First byte of it in the block.
    inside: usize,
    /// Address at the peer.
    from: usize,
    bytes: usize,
}

struct Read {
    ticket: Ticket,
    slot: Lease,
    agent: Arc<str>,
    peer: PeerId,
    request: u64,
    parts: Vec<Part>,
}

/// The address of a peer's blocks, and the name of its memory.
pub(super) struct Remote {
    agent: Arc<str>,
    base: u64,
    bytes: u64,
}

/// What came to its end in one round.
#[derive(Default)]
struct Ends {
    /// Requests that the peer need not hold blocks for any more.
    complete: Vec<(PeerId, u64)>,
    /// Connections that nothing can be read through any more, and why.
    lost: Vec<(PeerId, String)>,
}

impl Pulls {
    /// `staging` is memory that `engine` may write to, and `served` memory that it gives away.
    pub(super) fn new(
        mut engine: Box<dyn OneSided>,
        staging: &Arc<Region>,
        served: Option<Arc<Arena>>,
    ) -> Result<Pulls, NixlError> {
        let slots: Vec<Lease> = (0..staging.len() / SLOT_BYTES)
            .map(|at| staging.lease(at * SLOT_BYTES, SLOT_BYTES))
            .collect::<Result<_, _>>()
            .expect("the region is new");
        let introduction = Introduction {
            base: served
                .as_ref()
                .map_or(0, |arena| arena.base().as_ptr() as u64),
            bytes: served.as_ref().map_or(0, |arena| arena.len() as u64),
            agent: engine.introduction()?,
        };
        Ok(Pulls {
            engine,
            slots_per_peer: (slots.len() / SHARE).max(1),
            slots,
            reads: Vec::new(),
            turns: VecDeque::new(),
            requests: HashMap::new(),
            partners: HashMap::new(),
            introduction,
            moved: SimTime::ZERO,
            read_by_peers: false,
            _served: served,
        })
    }

    /// Bytes of staging memory for `asked`: whole slots, and one for a peer at least.
    pub(super) fn staging_bytes(asked: usize) -> usize {
        (asked / SLOT_BYTES).max(SHARE) * SLOT_BYTES
    }

    pub(super) fn introduction(&self) -> &Introduction {
        &self.introduction
    }

    /// How long to wait before the next look; `None` if nothing is under way.
    pub(super) fn pause_ns(&self, now: SimTime, spin_ns: u64) -> Option<u64> {
        let pause = if now.since(self.moved) < spin_ns {
            0
        } else {
            PAUSE_NS
        };
        (!self.reads.is_empty() || self.read_by_peers).then_some(pause)
    }

    /// A peer may read what this side has pinned for it.
    pub(super) fn on_pinned(&mut self, now: SimTime) {
        self.moved = now;
    }

    /// Lets the backend do what is due without a transfer, such as ending connections.
    pub(super) fn progress(&mut self) {
        self.engine.progress();
    }

    /// A connection stands to who introduces itself so.
    pub(super) fn meet(&mut self, theirs: &Introduction) -> Result<Remote, NixlError> {
        let agent: Arc<str> = self.engine.meet(&theirs.agent)?.into();
        let partner = self.partners.entry(Arc::clone(&agent)).or_default();
        partner.connections += 1;
        Ok(Remote {
            agent,
            base: theirs.base,
            bytes: theirs.bytes,
        })
    }

    /// A connection has ended. Its reads go on until they end by themselves.
    pub(super) fn leave(&mut self, peer: PeerId, remote: &Remote) {
        self.requests.retain(|_, pull| pull.peer != peer);
        if let Some(partner) = self.partners.get_mut(&remote.agent) {
            partner.connections -= 1;
        }
        self.part(&remote.agent);
    }

    /// Lets NIXL forget a peer that nothing is left to do with.
    fn part(&mut self, agent: &Arc<str>) {
        let Some(partner) = self.partners.get_mut(agent) else {
            return;
        };
        if partner.connections == 0 && partner.reads == 0 {
            self.engine.part(agent);
            self.slots.append(&mut partner.spoilt);
            self.partners.remove(agent);
        }
    }

    /// Nothing of a request is being read, or will be.
    fn end_if_complete(&mut self, request: u64, ends: &mut Ends) {
        let complete = |pull: &Pull| pull.parts.is_empty() && pull.reads == 0;
        if self.requests.get(&request).is_some_and(complete)
            && let Some(pull) = self.requests.remove(&request)
        {
            ends.complete.push((pull.peer, request));
        }
    }

    /// Posts one read of a request, if there is a slot. `false` if nothing was done.
    fn post(&mut self, request: u64) -> Result<bool, NixlError> {
        let Some(pull) = self.requests.get_mut(&request) else {
            return Ok(false);
        };
        let partner = self.partners.get_mut(&pull.agent).expect("it stands");
        let room = partner.reads + partner.spoilt.len() < self.slots_per_peer;
        let Some(mut slot) = self.slots.pop_if(|_| room) else {
            return Ok(false);
        };
        let to = slot.bytes_mut().as_mut_ptr() as usize;
        let (mut parts, mut spans, mut filled) = (Vec::new(), Vec::new(), 0);
        while let Some(part) = pull.parts.front()
            && filled + part.bytes <= SLOT_BYTES
        {
            let part = pull.parts.pop_front().expect("front() returned Some");
            spans.push(Span {
                to: to + filled,
                from: part.from,
                bytes: part.bytes,
            });
            filled += part.bytes;
            parts.push(part);
        }
        // SAFETY: the slot is staging memory, which is registered (`new`), and a lease that is not
        // touched until the read has ended: it goes to `reads`, or below to `spoilt`.
        match unsafe { self.engine.read(&pull.agent, &spans) } {
            Ok(ticket) => {
                partner.reads += 1;
                pull.reads += 1;
                self.reads.push(Read {
                    ticket,
                    slot,
                    agent: Arc::clone(&pull.agent),
                    peer: pull.peer,
                    request,
                    parts,
                });
                Ok(true)
            }
            Err(error) => {
                partner.spoilt.push(slot);
                Err(error)
            }
        }
    }
}

impl Drop for Pulls {
    /// Waits a little for reads under way, which are memory copies most of the time: an agent that
    /// ends while some are is safe, but warns.
    fn drop(&mut self) {
        let until = clock::now() + ENDING_NS;
        while !self.reads.is_empty() && clock::now() < until {
            let engine = &mut self.engine;
            self.reads
                .retain(|read| engine.poll(read.ticket) == Reading::UnderWay);
            std::thread::yield_now();
        }
    }
}

impl Run {
    /// A peer's blocks are pinned: they are to be read.
    pub(super) fn begin_pull(
        &mut self,
        conn: &mut Conn,
        request: u64,
        answers: Vec<Answer>,
    ) -> Result<(), CloseReason> {
        let mut parts = VecDeque::new();
        let mut blocks = Vec::with_capacity(answers.len());
        for (block, answer) in answers.into_iter().enumerate() {
            let outcome = match answer {
                Answer::Here {
                    checksum: sum,
                    offset,
                    len,
                } => {
                    let there = conn.remote.as_ref().is_some_and(|remote| {
                        let end = offset.checked_add(u64::from(len));
                        end.is_some_and(|end| end <= remote.bytes)
                    });
                    let wanted = place_of(&mut self.transfers, request, block as u32)
                        .map(|place| place.len());
                    if !there || wanted.is_some_and(|wanted| wanted != len as usize) {
                        return Err(CloseReason::Text(
                            "its blocks are outside of its memory, or not as long as was asked for"
                                .into(),
                        ));
                    }
                    let remote = conn.remote.as_ref().expect("it has memory");
                    let from = (remote.base + offset) as usize;
                    parts.extend((0..len as usize).step_by(SLOT_BYTES).map(|inside| Part {
                        block,
                        inside,
                        from: from + inside,
                        bytes: (len as usize - inside).min(SLOT_BYTES),
                    }));
                    blocks.push((len as usize, sum));
                    // Nothing has to be read of an empty one.
                    if len > 0 {
                        continue;
                    }
                    Ok(())
                }
                Answer::Absent => Err(FetchError::Absent),
                Answer::Length(_) => Err(FetchError::Length),
            };
            blocks.resize(block + 1, (0, 0));
            self.settle(request, block, outcome);
        }
        self.finish_if_settled(request);
        let (Some(pulls), Some(remote)) = (&mut self.pulls, &conn.remote) else {
            return Ok(());
        };
        if pulls.requests.contains_key(&request) {
            return Err(CloseReason::Text("it answers a request twice".into()));
        }
        let pull = Pull {
            peer: conn.peer,
            agent: Arc::clone(&remote.agent),
            parts,
            blocks,
            reads: 0,
        };
        pulls.requests.insert(request, pull);
        pulls.turns.push_back(request);
        Ok(())
    }

    /// Takes what was read, and reads on.
    pub(super) fn pull_some(&mut self) {
        let Some(mut pulls) = self.pulls.take() else {
            return;
        };
        let mut ends = Ends::default();
        self.pull_some_of(&mut pulls, &mut ends);
        // With the connections' end in mind, which needs the pulls.
        self.pulls = Some(pulls);
        for (peer, request) in ends.complete {
            self.with_conn(peer, |_, conn| {
                conn.push(release(request));
                Ok(())
            });
        }
        for (peer, why) in ends.lost {
            self.with_conn(peer, |_, _| Err(CloseReason::Text(why)));
        }
    }

    fn pull_some_of(&mut self, pulls: &mut Pulls, ends: &mut Ends) {
        let pinned = |conn: &Conn| conn.scheme == Scheme::Pull && !conn.pins.is_empty();
        pulls.read_by_peers = self.conns.iter().flatten().any(pinned);
        if pulls.read_by_peers {
            pulls.engine.progress();
            if pulls.reads.is_empty() {
                // It may be this CPU that the reader waits for.
                std::thread::yield_now();
            }
        }
        let (mut at, mut turn, mut worked) = (0, 0, false);
        while at < pulls.reads.len() && turn < TURN_BYTES {
            if self.end_read(pulls, at, ends) {
                worked = true;
                turn += SLOT_BYTES;
            } else {
                at += 1;
            }
        }
        // As many looks as there are requests: one that waits for a slot does not hold up others.
        for _ in 0..pulls.turns.len() {
            let Some(request) = pulls.turns.pop_front() else {
                break;
            };
            if !self.transfers.contains_key(&request)
                && let Some(pull) = pulls.requests.get_mut(&request)
            {
                pull.parts.clear(); // the transfer has ended
            }
            while let Some(pull) = pulls.requests.get(&request)
                && !pull.parts.is_empty()
            {
                let peer = pull.peer;
                match pulls.post(request) {
                    Ok(true) => {
                        worked = true;
                        // On one host it has often ended already: then its bytes are still in a
                        // cache, and the next one has its slot.
                        let last = pulls.reads.len() - 1;
                        if turn < TURN_BYTES && self.end_read(pulls, last, ends) {
                            turn += SLOT_BYTES;
                        }
                    }
                    Ok(false) => break,
                    Err(error) => {
                        ends.lost.push((peer, error.to_string()));
                        break;
                    }
                }
            }
            let has_more = |pull: &Pull| !pull.parts.is_empty();
            if pulls.requests.get(&request).is_some_and(has_more) {
                pulls.turns.push_back(request);
            } else {
                pulls.end_if_complete(request, ends);
            }
        }
        if worked {
            pulls.moved = clock::now();
        }
    }

    /// Takes what was read if the read at `at` has ended. `false` if it has not.
    fn end_read(&mut self, pulls: &mut Pulls, at: usize, ends: &mut Ends) -> bool {
        let reading = pulls.engine.poll(pulls.reads[at].ticket);
        if reading == Reading::UnderWay {
            return false;
        }
        let read = pulls.reads.swap_remove(at);
        let partner = pulls.partners.get_mut(&read.agent).expect("it has a read");
        partner.reads -= 1;
        if reading == Reading::Done {
            self.take_read(pulls, &read);
            pulls.slots.push(read.slot);
        } else {
            partner.spoilt.push(read.slot);
            let why = "a read of its memory by NIXL failed".into();
            ends.lost.push((read.peer, why));
        }
        pulls.part(&read.agent);
        pulls.end_if_complete(read.request, ends);
        true
    }

    /// Copies what was read to its places.
    fn take_read(&mut self, pulls: &mut Pulls, read: &Read) {
        let Some(pull) = pulls.requests.get_mut(&read.request) else {
            return;
        };
        pull.reads -= 1;
        // The peer holds a block in its place until the deadline only.
        let in_time = |deadline| clock::now() <= deadline;
        let verify = self.shared.options.verify;
        let mut from = 0;
        for part in &read.parts {
            let bytes = &read.slot.bytes()[from..from + part.bytes];
            from += part.bytes;
            let deadline = self.transfers.get(&read.request).map(|t| t.deadline);
            let (Some(deadline), Some(place)) = (
                deadline,
                place_of(&mut self.transfers, read.request, part.block as u32),
            ) else {
                continue;
            };
            let whole = part.bytes == place.len();
            let to = &mut place[part.inside..part.inside + part.bytes];
            let came = if verify && whole {
                // SAFETY: two slices of one length that others do not have.
                Some(unsafe { copy_hashed(bytes.as_ptr(), to.as_mut_ptr(), bytes.len()) })
            } else {
                to.copy_from_slice(bytes);
                None
            };
            let (left, sum) = &mut pull.blocks[part.block];
            *left -= part.bytes;
            if *left == 0 {
                let right = || came.unwrap_or_else(|| checksum(place)) == *sum;
                let outcome = if verify && !right() {
                    Err(FetchError::Checksum)
                } else if !in_time(deadline) {
                    Err(FetchError::Deadline)
                } else {
                    Ok(())
                };
                self.settle(read.request, part.block, outcome);
            }
        }
        self.finish_if_settled(read.request);
    }
}

/// Lets a peer go on with the blocks of a request.
pub(super) fn release(request: u64) -> Piece {
    Piece::Bytes(frame(Kind::Release, &request.to_le_bytes()))
}
