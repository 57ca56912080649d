//! Discovered peers: the record of this engine, and the connections to the others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use slipstream_discovery::{Session, SessionEvent};

use super::StoreError;
use super::links::PeerLinks;
use crate::discovery::{PeerRecord, folder};
use crate::transport::Address;

/// A killed rank is removed after one to two leases; its connection ends sooner.
const LEASE: Duration = Duration::from_secs(15);
/// Maximum number of remembered peers with another identity, so that each is logged once.
const FOREIGN_MAX: usize = 1_024;

/// How engines find each other, and the identity of this one.
#[derive(Clone, Debug)]
pub struct PeerDiscovery {
    /// A folder that all of them can read and write.
    pub folder: PathBuf,
    /// Shared by all ranks of an engine, and by no other engine.
    pub engine: String,
    /// This rank; it connects to the same rank of other engines.
    pub rank: u32,
    /// The properties that its blocks depend on.
    pub identity: BTreeMap<String, String>,
    /// Whether `nixl:` addresses can be used.
    pub nixl: bool,
}

impl PeerDiscovery {
    /// The record by which others find this rank.
    fn record(&self, name: &str, addresses: &[Address]) -> Result<PeerRecord, StoreError> {
        for address in addresses {
            let ip = match address {
                Address::Tcp(at) | Address::Nixl(at) => at.ip(),
                Address::Unix(_) => continue,
            };
            if ip.is_unspecified() {
                return Err(StoreError::Unreachable {
                    address: address.clone(),
                });
            }
        }
        Ok(PeerRecord {
            engine: self.engine.clone(),
            rank: self.rank,
            name: name.to_owned(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            host: boot_id(),
            identity: self.identity.clone(),
        })
    }

    fn on_appeared(&self, record: &PeerRecord, links: &PeerLinks, foreign: &mut Foreign) {
        if record.engine == self.engine {
            return;
        }
        if let Some(difference) = self.difference(record) {
            if foreign.len() < FOREIGN_MAX && foreign.insert((record.engine.clone(), record.rank)) {
                tracing::warn!("ignoring peer {}: {difference}", record.name);
            }
            return;
        }
        let here = boot_id();
        let is_usable = |address: &Address| match address {
            Address::Tcp(_) => true,
            Address::Nixl(_) => self.nixl,
            Address::Unix(_) => record.host == here,
        };
        let addresses = record.addresses.iter();
        let addresses = addresses.filter_map(|address| address.parse().ok());
        let addresses: Vec<Address> = addresses.filter(is_usable).collect();
        if addresses.is_empty() {
            tracing::warn!(
                "ignoring peer {}: none of its addresses {:?} can be used here; listen at a \
                 tcp:// address as well",
                record.name,
                record.addresses
            );
            return;
        }
        links.add_discovered(&record.engine, addresses);
    }

    /// The first difference that keeps the two from sharing blocks, if any.
    fn difference(&self, record: &PeerRecord) -> Option<String> {
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

/// Engines and ranks whose identity differs.
type Foreign = BTreeSet<(String, u32)>;

/// One rank of this engine, and its connections.
pub(super) type RankLinks = (PeerDiscovery, Weak<PeerLinks>);

/// Publishes one rank, if it listens, and connects each rank to its peers as they appear.
pub(super) fn start(
    ranks: Vec<RankLinks>,
    publish: Option<(&str, &[Address])>,
) -> Result<Session, StoreError> {
    let (first, _) = ranks.first().expect("an engine has at least one rank");
    let publish = publish
        .map(|(name, addresses)| first.record(name, addresses))
        .transpose()?
        .map(|record| (record, LEASE));
    let backend = folder(&first.folder).map_err(slipstream_discovery::SessionError::from)?;
    let mut foreign = Foreign::new();
    // Weak references: a store that was dropped must close its links even if this thread waits for
    // the folder.
    let links_of = move |rank: Option<u32>| -> Vec<(PeerDiscovery, Arc<PeerLinks>)> {
        let ranks = ranks
            .iter()
            .filter(|(of, _)| rank.is_none_or(|rank| of.rank == rank));
        let links = ranks.filter_map(|(of, links)| Some((of.clone(), links.upgrade()?)));
        links.collect()
    };
    let on_event = move |event: SessionEvent<PeerRecord>| match event {
        SessionEvent::Appeared(record) => {
            for (discovery, links) in links_of(Some(record.rank)) {
                discovery.on_appeared(&record, &links, &mut foreign);
            }
        }
        SessionEvent::Vanished(record) => {
            foreign.remove(&(record.engine.clone(), record.rank));
            for (_, links) in links_of(Some(record.rank)) {
                links.remove_discovered(&record.engine);
            }
        }
        SessionEvent::Invalid { name, reason } => tracing::warn!(
            "ignoring {name}, which is not an engine's record: {reason}; peers_dir is only for \
             engines, remove other files"
        ),
        SessionEvent::Synced => {
            for (_, links) in links_of(None) {
                links.set_synced();
            }
        }
        SessionEvent::Failed(error) => {
            tracing::warn!("{error}; known peers are kept until then");
        }
        SessionEvent::Recovered => tracing::warn!("the folder of peers is readable again"),
    };
    Ok(Session::start("kv-discovery", backend, publish, on_event)?)
}

/// The boot id of this host; empty if the system has none.
fn boot_id() -> String {
    let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    text.unwrap_or_default().trim().to_owned()
}
