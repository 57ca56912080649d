//! One shard of one frontend: dials it, greets it, relays, and dials again.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use slipstream_base::width::to_u16;
use slipstream_planes::clock::clock_id;
use slipstream_planes::link::{Link, LinkError};
use slipstream_planes::wire::{self, Announced, FrameKind, Hello, Reject, Welcome, WireError};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::relay::Relay;
use super::{Home, Stage};
use crate::stats::Cell64;

/// Pause before a dial is repeated, doubled after each failure up to the second.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Whom to dial.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) frontend: String,
    pub(super) instance: u64,
    pub(super) shard: u8,
    pub(super) address: String,
    /// From the frontend's record.
    pub(super) key: [u8; 16],
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
pub(super) async fn dial(
    home: Rc<Home>,
    mut wanted: watch::Receiver<Option<Target>>,
    mut staged: watch::Receiver<Stage>,
) {
    let mut pause = PAUSE;
    let mut said = String::new();
    loop {
        if *staged.borrow_and_update() >= Stage::Leaving {
            return;
        }
        let Some(target) = wanted.borrow_and_update().clone() else {
            return;
        };
        let error = match serve_once(&home, &target, staged.clone()).await {
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
            let (frontend, shard) = (&target.frontend, target.shard);
            tracing::warn!("{frontend} shard {shard} at {}: {error}", target.address);
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

enum Ended {
    NoLink,
    Dial(DialError),
    Lost(LinkError),
}

/// Connects and relays until the connection ends. `Ok` if this process ended it.
async fn serve_once(
    home: &Rc<Home>,
    target: &Target,
    staged: watch::Receiver<Stage>,
) -> Result<(), Ended> {
    // Taken first: a shard that is greeted is served.
    let port = home.free.borrow_mut().pop().ok_or(Ended::NoLink)?;
    let subscription = home.broadcast.subscribe();
    let limit = home.config.deadline;
    let greeted = match timeout(limit, greet(home, target)).await {
        Ok(greeted) => greeted,
        Err(_) => Err(DialError::Timeout(limit)),
    };
    let (link, welcome) = match greeted {
        Ok(greeted) => greeted,
        Err(error) => {
            if !slipstream_base::planted!("leaked-link") {
                home.free.borrow_mut().push(port);
            }
            return Err(Ended::Dial(error));
        }
    };
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

async fn greet(home: &Home, target: &Target) -> Result<(Link, Welcome), DialError> {
    let socket = home.connect(&target.address).await.map_err(LinkError::Io)?;
    let config = &home.config;
    let mut link = Link::new(socket, config.deadline, config.unsent_bytes_max);
    let hello = Hello {
        instance: config.instance,
        fingerprint: config.fingerprint,
        shard: target.shard,
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
        key: target.key,
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
    if welcome.instance != target.instance || welcome.shard != target.shard {
        return Err(DialError::Stranger);
    }
    // The shorter patience counts: pings come four times in it, either way.
    let theirs = Duration::from_millis(welcome.deadline_ms.into());
    link.set_deadline(config.deadline.min(theirs.max(Duration::from_millis(10))));
    Ok((link, welcome))
}

/// Appends how the ranks of this process are.
pub(super) fn put_loads(home: &Home, out: &mut Vec<u8>) {
    let at_most = |gauge: &Cell64| u32::try_from(gauge.get()).unwrap_or(u32::MAX);
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
