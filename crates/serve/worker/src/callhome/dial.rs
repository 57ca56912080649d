//! One shard of one frontend: dials it, greets it, relays, and dials again.
//!
//! A record may be false. Thousands of false records, with hundreds of addresses that do not answer,
//! must not keep workers from real frontends. So a record is unproven until one of its shards has
//! welcomed this process: until then, one dialer tries the shards in turn. Few such attempts run at a
//! time, in the order in which they were due, and they hold few links.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use slipstream_base::count::Count;
use slipstream_base::width::{to_u8, to_u16};
use slipstream_planes::clock::clock_id;
use slipstream_planes::discovery::{ProcessRecord, SeatKey};
use slipstream_planes::link::{Link, LinkError, Socket};
use slipstream_planes::wire::{self, Announced, FrameKind, Hello, Reject, Welcome, WireError};
use tokio::sync::{SemaphorePermit, mpsc, watch};
use tokio::time::{sleep, timeout};

use super::relay::Relay;
use super::{Home, Stage};

/// Pause before a dial is repeated, doubled after each failure up to the second.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Limit of concurrent attempts to dial unproven frontends.
pub(super) const UNPROVEN_DIALS_MAX: usize = 64;

/// Time limit to connect to an unproven frontend, and to be welcomed. Other dialers wait for their turn.
const UNPROVEN_LIMIT: Duration = Duration::from_millis(1_500);

/// Shards of one frontend to dial, in turn.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) record: Rc<ProcessRecord>,
    /// The shard; `None`: one after the other, until one welcomes this process.
    pub(super) shard: Option<u8>,
}

impl Target {
    fn key(&self) -> [u8; 16] {
        self.record.key.as_ref().map_or([0; 16], SeatKey::bytes)
    }

    /// The shard of attempt number `attempt`, and its address; `None`: the record has none.
    fn shard(&self, attempt: usize) -> Option<(u8, &str)> {
        let shards = self.record.shards.len().min(1 + usize::from(u8::MAX));
        let shard = match self.shard {
            Some(shard) => shard,
            None => to_u8(attempt.checked_rem(shards)?),
        };
        Some((shard, self.record.shards.get(usize::from(shard))?))
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum DialError {
    #[error("{0}")]
    Link(#[from] LinkError),
    #[error("no answer for {0:?}")]
    Timeout(Duration),
    #[error("rejected: {0}")]
    Rejected(#[from] Reject),
    #[error("the address belongs to another frontend by now")]
    Stranger,
}

/// Keeps one connection to the target for as long as there is one and this process runs. An open
/// connection continues without; the dialer ends when it would have to dial and nobody is wanted.
///
/// The shard that welcomes this process first is sent to `proven`, with the instance.
pub(super) async fn dial(
    home: Rc<Home>,
    mut wanted: watch::Receiver<Option<Target>>,
    mut staged: watch::Receiver<Stage>,
    proven: Proven,
) {
    let mut pause = PAUSE;
    let mut said = String::new();
    for attempt in 0.. {
        if *staged.borrow_and_update() >= Stage::Leaving {
            return;
        }
        let Some(target) = wanted.borrow_and_update().clone() else {
            return;
        };
        let Some((shard, address)) = target.shard(attempt) else {
            return;
        };
        let aim = Aim {
            target: &target,
            shard,
            address,
            proven: target.shard.is_none().then_some(&proven),
        };
        let error = match serve_once(&home, &aim, staged.clone()).await {
            Ok(()) => return,
            Err(Ended::NoLink) => {
                home.count(|s| &s.links_short);
                "every link of this process is in use; start it with more --links".to_owned()
            }
            Err(Ended::Dial(error)) => {
                match &error {
                    DialError::Rejected(_) | DialError::Stranger => home.count(|s| &s.rejected),
                    _ => home.count(|s| &s.failed),
                }
                error.to_string()
            }
            Err(Ended::Lost(error)) => {
                pause = PAUSE;
                home.count(|s| &s.lost);
                match &error {
                    LinkError::Silent { .. } | LinkError::Unread { .. } => {
                        home.count(|s| &s.silent);
                    }
                    LinkError::Wire(_) => home.count(|s| &s.malformed),
                    LinkError::Closed | LinkError::Io(_) => {}
                }
                said.clear();
                error.to_string()
            }
        };
        // Once, not at every attempt.
        if error != said {
            tracing::warn!("{} shard {shard} at {address}: {error}", target.record.name);
            said = error;
        }
        tokio::select! {
            biased;
            () = sleep(pause) => {}
            _ = wanted.changed() => {}
            _ = staged.changed() => {}
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Where welcomes of unproven frontends are reported: the instance and the shard.
pub(super) type Proven = mpsc::UnboundedSender<(u64, u8)>;

/// One attempt.
struct Aim<'a> {
    target: &'a Target,
    shard: u8,
    address: &'a str,
    /// Set if the frontend is not proven.
    proven: Option<&'a Proven>,
}

enum Ended {
    NoLink,
    Dial(DialError),
    Lost(LinkError),
}

/// Connects and relays until the connection ends. `Ok` if this process ended it.
async fn serve_once(
    home: &Rc<Home>,
    aim: &Aim<'_>,
    staged: watch::Receiver<Stage>,
) -> Result<(), Ended> {
    let deadline = home.config.deadline;
    let mut leaving = staged.clone();
    let (socket, permits) = tokio::select! {
        biased;
        _ = leaving.wait_for(|stage| *stage >= Stage::Leaving) => return Ok(()),
        connected = connect(home, aim) => connected.map_err(Ended::Dial)?,
    };
    // Taken before the greeting: a shard that is greeted is served.
    let port = home.free.borrow_mut().pop().ok_or(Ended::NoLink)?;
    let subscription = home.broadcast.subscribe();
    let limit = match aim.proven {
        Some(_) => deadline.min(UNPROVEN_LIMIT),
        None => deadline,
    };
    let greeted = match timeout(limit, greet(home, aim, socket)).await {
        Ok(greeted) => greeted,
        Err(_) => Err(DialError::Timeout(limit)),
    };
    drop(permits);
    let (link, welcome) = match greeted {
        Ok(greeted) => greeted,
        Err(error) => {
            if !slipstream_base::planted!("leaked-link") {
                home.free.borrow_mut().push(port);
            }
            return Err(Ended::Dial(error));
        }
    };
    if let Some(proven) = aim.proven {
        // An error: this process is about to end.
        let _ = proven.send((aim.target.record.instance, aim.shard));
    }
    home.count(|s| &s.connected);
    home.stats.open.fetch_add(1, Relaxed);
    tracing::info!("serving {} shard {}", welcome.name, welcome.shard);
    let mut relay = Relay::new(home.clone(), link, port, subscription, welcome.wants_kv);
    let outcome = relay.run(staged).await;
    home.stats.open.fetch_sub(1, Relaxed);
    let port = relay.hang_up().await;
    home.free.borrow_mut().push(port);
    outcome.map_err(Ended::Lost)
}

/// Connects. An attempt at an unproven frontend first waits for its turn, which ends when the permits are dropped.
async fn connect<'h>(
    home: &'h Home,
    aim: &Aim<'_>,
) -> Result<(Box<dyn Socket>, [Option<SemaphorePermit<'h>>; 2]), DialError> {
    let mut permits = [None, None];
    let mut limit = home.config.deadline;
    if aim.proven.is_some() {
        // The semaphores are never closed.
        permits[0] = home.unproven.acquire().await.ok();
        limit = limit.min(UNPROVEN_LIMIT);
    }
    let connected = timeout(limit, home.connect(aim.address)).await;
    let socket = connected.map_err(|_| DialError::Timeout(limit))?;
    let socket = socket.map_err(LinkError::Io)?;
    if aim.proven.is_some() {
        permits[1] = home.unproven_links.acquire().await.ok();
    }
    Ok((socket, permits))
}

async fn greet(
    home: &Home,
    aim: &Aim<'_>,
    socket: Box<dyn Socket>,
) -> Result<(Link, Welcome), DialError> {
    let config = &home.config;
    let mut link = Link::new(socket, config.deadline, config.unsent_bytes_max);
    let hello = Hello {
        instance: config.instance,
        fingerprint: config.fingerprint,
        shard: aim.shard,
        deadline_ms: wire::deadline_ms(config.deadline),
        clock: clock_id(),
        name: config.name.clone(),
        workers: home
            .workers
            .iter()
            .map(|worker| Announced {
                worker: worker.worker,
                ranks: to_u16(worker.ranks.len()),
                ready: worker.is_ready(),
            })
            .collect(),
        key: aim.target.key(),
    };
    hello.encode(link.outbox());
    link.flush().await?;
    let answer = link
        .receive(|kind, body| match kind {
            FrameKind::Welcome => Welcome::decode(body).map(Ok),
            FrameKind::Reject => Reject::decode(body).map(Err),
            kind => Err(WireError::Place {
                kind,
                place: "in a greeting",
            }),
        })
        .await?;
    let welcome = answer?;
    if welcome.instance != aim.target.record.instance || welcome.shard != aim.shard {
        return Err(DialError::Stranger);
    }
    // The shorter patience counts: pings come four times in it, either way.
    let theirs = Duration::from_millis(welcome.deadline_ms.into());
    link.set_deadline(config.deadline.min(theirs.max(Duration::from_millis(10))));
    // The streams of a stopped frontend are kept while its record may be valid: no other frontend can continue them.
    link.extend_patience(config.lease);
    Ok((link, welcome))
}

/// Appends how the ranks of this process are.
pub(super) fn put_loads(home: &Home, out: &mut Vec<u8>) {
    let at_most = |gauge: &Count| u32::try_from(gauge.get()).unwrap_or(u32::MAX);
    let loads: Vec<wire::RankLoad> = home
        .workers
        .iter()
        .flat_map(|worker| &worker.ranks)
        .map(|stats| wire::RankLoad {
            rank: stats.rank,
            running: at_most(&stats.running),
            waiting: at_most(&stats.waiting),
            used_blocks: at_most(&stats.used_blocks),
            total_blocks: at_most(&stats.total_blocks),
        })
        .collect();
    wire::encode_loads(&loads, out);
}
