//! Engines that find each other in a folder: [`slipstream_kvstore::discovery`] on a thread of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use slipstream_kvstore::Address;
use slipstream_kvstore::clock;
use slipstream_kvstore::discovery::{Change, DiscoveryError, Published, Record, Watch};

use crate::peers::Links;

/// A rank that is killed is forgotten after this; its connection ends sooner.
const LEASE: Duration = Duration::from_secs(15);
/// Three times in a lease, so that two writes may fail.
const RENEWAL: Duration = Duration::from_secs(5);
/// How often the folder is looked at: how long an engine that joins waits for its first peer.
const LOOK: Duration = Duration::from_millis(500);

/// Where engines meet, and who this one is there.
pub(crate) struct Meeting {
    pub(crate) folder: PathBuf,
    /// One for all ranks of an engine, and its scheduler's half.
    pub(crate) engine: String,
    pub(crate) rank: u32,
    pub(crate) identity: BTreeMap<String, String>,
    /// `nixl:` addresses can be used.
    pub(crate) nixl: bool,
}

impl Meeting {
    /// Publishes where this rank listens, so that others find it.
    pub(crate) fn publish(&self, name: &str, addresses: &[Address]) -> PyResult<Published> {
        for address in addresses {
            let ip = match address {
                Address::Tcp(at) | Address::Nixl(at) => at.ip(),
                Address::Unix(_) => continue,
            };
            if ip.is_unspecified() {
                return Err(PyValueError::new_err(format!(
                    "peers cannot reach an engine at {address}; listen at an address of this host, \
                     such as tcp://10.0.0.1:7300, or leave out peers_dir"
                )));
            }
        }
        let record = Record {
            engine: self.engine.clone(),
            rank: self.rank,
            name: name.to_owned(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            host: host(),
            identity: self.identity.clone(),
            lease_ms: LEASE.as_millis() as u64,
            beat: 0,
        };
        Published::new(&self.folder, record).map_err(|error| PyOSError::new_err(error.to_string()))
    }

    fn meet(&self, record: &Record, links: &Links, strangers: &mut BTreeSet<(String, u32)>) {
        if record.engine == self.engine {
            return;
        }
        if let Some(difference) = self.difference(record) {
            if strangers.insert((record.engine.clone(), record.rank)) {
                tracing::warn!("no blocks of peer {}: {difference}", record.name);
            }
            return;
        }
        let here = host();
        let usable = |address: &Address| match address {
            Address::Tcp(_) => true,
            Address::Nixl(_) => self.nixl,
            Address::Unix(_) => record.host == here,
        };
        let addresses: Vec<Address> = record
            .addresses
            .iter()
            .filter_map(|address| address.parse().ok())
            .filter(usable)
            .collect();
        if addresses.is_empty() {
            tracing::warn!(
                "no blocks of peer {}: none of its addresses {:?} can be used here; listen at a \
                 tcp:// address as well",
                record.name,
                record.addresses
            );
            return;
        }
        links.join(&record.engine, addresses);
    }

    /// What keeps the two from sharing blocks, if anything does.
    fn difference(&self, record: &Record) -> Option<String> {
        let fields: BTreeSet<&String> =
            self.identity.keys().chain(record.identity.keys()).collect();
        fields.into_iter().find_map(|field| {
            let of = |identity: &BTreeMap<String, String>| {
                identity.get(field).map_or("none", |value| value).to_owned()
            };
            let (ours, theirs) = (of(&self.identity), of(&record.identity));
            (ours != theirs).then(|| {
                format!(
                    "`{field}` is `{ours}` here and `{theirs}` there; engines that share blocks \
                     need one value"
                )
            })
        })
    }
}

/// Renews what was published and tells who comes and goes, each rank's to its links, until `stop`.
pub(crate) fn attend(
    mut published: Option<Published>,
    sides: &[(&Meeting, &Links)],
    stop: impl Fn() -> bool,
) {
    let Some((first, _)) = sides.first() else {
        return;
    };
    let mut watch = Watch::new(&first.folder);
    let (mut renew_at, mut changes) = (Instant::now() + RENEWAL, Vec::new());
    // What was said of the folder, and of ranks that do not fit, so that it is said once.
    let (mut said, mut strangers) = (String::new(), BTreeSet::new());
    while !stop() {
        let mut trouble = Ok(());
        if let Some(published) = published.as_mut().filter(|_| Instant::now() >= renew_at) {
            trouble = published.renew();
            renew_at = Instant::now() + RENEWAL;
        }
        trouble = trouble.and(watch.look(clock::now(), &mut changes));
        report(&trouble, &mut said);
        for change in changes.drain(..) {
            let of_rank = |rank: u32| sides.iter().filter(move |side| side.0.rank == rank);
            match change {
                Change::Appeared(record) => {
                    for (meeting, links) in of_rank(record.rank) {
                        meeting.meet(&record, links, &mut strangers);
                    }
                }
                Change::Vanished(record) => {
                    strangers.remove(&(record.engine.clone(), record.rank));
                    for (_, links) in of_rank(record.rank) {
                        links.leave(&record.engine);
                    }
                }
                Change::Bad(path, why) => tracing::warn!(
                    "{} is ignored, as it is no engine's record: {why}; peers_dir is for engines \
                     alone, remove what is not theirs",
                    path.display()
                ),
            }
        }
        for (_, links) in sides {
            links.looked();
        }
        std::thread::park_timeout(LOOK);
    }
}

fn report(trouble: &Result<(), DiscoveryError>, said: &mut String) {
    match trouble {
        Ok(()) if !said.is_empty() => {
            said.clear();
            tracing::warn!("the folder of peers can be used again");
        }
        Err(error) if *said != error.to_string() => {
            *said = error.to_string();
            tracing::warn!("{said}; peers that are known stay known until then");
        }
        _ => {}
    }
}

/// The start of this host; empty where it does not tell.
fn host() -> String {
    let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    text.unwrap_or_default().trim().to_owned()
}
