//! The paths of flows, before their ports exist.

use slipstream_base::mix;
use slipstream_base::width::to_u32;

use crate::error::Error;
use crate::event::HOPS_MAX;
use crate::net::Rows;
use crate::route::{Router, Routing};
use crate::scenario::{Flow, Paths, Scenario};
use crate::topology::{PortId, Topology};

/// Ports of all rows back to back, until the longest path is known.
pub(super) struct PathStore {
    ports: Vec<PortId>,
    ends: Vec<u32>,
    longest: usize,
    path: Vec<PortId>,
    /// Maximum length of `ports`: 32-bit indexes, and the limit of memory.
    ports_max: usize,
}

impl PathStore {
    pub(super) fn new(flows: usize, memory_bytes_max: u64) -> Self {
        let room = memory_bytes_max / size_of::<PortId>() as u64;
        PathStore {
            ports_max: usize::try_from(room.min(u64::from(u32::MAX))).unwrap_or(usize::MAX),
            ports: Vec::with_capacity(flows * 12),
            ends: Vec::with_capacity(flows * 2),
            longest: 0,
            path: Vec::new(),
        }
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.ends.len()
    }

    /// Links of the longest path.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Forgets the rows from `rows` on.
    pub(super) fn truncate(&mut self, rows: usize) {
        self.ends.truncate(rows);
        let ports = self.ends.last().map_or(0, |&end| end as usize);
        self.ports.truncate(ports);
    }

    pub(super) fn path(&self, row: u32) -> &[PortId] {
        let from = row.checked_sub(1).map_or(0, |r| self.ends[r as usize]);
        &self.ports[from as usize..self.ends[row as usize] as usize]
    }

    pub(super) fn same(&self, a: Rows, b: Rows) -> bool {
        a.count == b.count && (0..a.count).all(|i| self.path(a.first + i) == self.path(b.first + i))
    }

    /// Finds the paths of a flow in one direction and stores their ports; `None` if there is no
    /// path.
    pub(super) fn find(
        &mut self,
        scenario: &Scenario,
        router: &mut Router<'_>,
        flow: &Flow,
        direction: usize,
    ) -> Result<Option<Rows>, Error> {
        let (src, dst) = if direction == 0 {
            (flow.src, flow.dst)
        } else {
            (flow.dst, flow.src)
        };
        let mut rows = Rows {
            first: to_u32(self.ends.len()),
            count: 1,
        };
        match &flow.paths {
            Paths::By(routing) => {
                let hash = mix::draw(
                    scenario.seed ^ mix::mix64(flow.id),
                    u64::from(src) << 32 | u64::from(dst),
                );
                let mut index = 0;
                while index < rows.count {
                    let Some(paths) = router.path(src, dst, *routing, hash, index, &mut self.path)
                    else {
                        return Ok(None);
                    };
                    if *routing == Routing::Spray {
                        // Outside of fat-trees the number of branches may differ between paths.
                        rows.count = rows.count.max(paths.min(scenario.spray_paths));
                    }
                    index += 1;
                    self.keep()?;
                }
            }
            Paths::Explicit(nodes) => {
                let nodes = explicit(flow, nodes, direction == 1, &scenario.topology)?;
                router
                    .ports(src, dst, &nodes, &mut self.path)
                    .map_err(|(a, b)| Error::Flow {
                        flow: flow.id,
                        what: format!(
                            "its path goes from node {a} to node {b}, which have no link; \
                             add the edge or correct the path"
                        ),
                    })?;
                self.keep()?;
            }
        }
        if self.path.is_empty() {
            return Err(Error::Flow {
                flow: flow.id,
                what: format!(
                    "hosts {} and {} share a switch and host links are not modeled, so its packets \
                     would cross no link; model host links",
                    scenario.topology.host_number(src),
                    scenario.topology.host_number(dst)
                ),
            });
        }
        if self.longest > HOPS_MAX {
            return Err(Error::Flow {
                flow: flow.id,
                what: format!(
                    "its path has {} links; at most {HOPS_MAX} are supported",
                    self.longest
                ),
            });
        }
        Ok(Some(rows))
    }

    /// Stores the path that was found.
    fn keep(&mut self) -> Result<(), Error> {
        if self.ports.len() + self.path.len() > self.ports_max {
            return Err(Error::Value(format!(
                "the paths of all flows have more than {} links in total, the most that memory and \
                 32-bit indexes allow; use fewer flows, or a lower `routing.spray_paths`",
                self.ports_max
            )));
        }
        self.ports.extend_from_slice(&self.path);
        self.ends.push(to_u32(self.ports.len()));
        self.longest = self.longest.max(self.path.len());
        Ok(())
    }
}

pub(super) fn disconnected(flow: &Flow, topology: &Topology) -> Error {
    let (src, dst) = (
        topology.host_number(flow.src),
        topology.host_number(flow.dst),
    );
    Error::Flow {
        flow: flow.id,
        what: format!("no path leads from host {src} to host {dst}; add edges between them"),
    }
}

fn explicit(
    flow: &Flow,
    nodes: &[u32],
    back: bool,
    topology: &Topology,
) -> Result<Vec<u32>, Error> {
    let (from, to) = (topology.attachment(flow.src), topology.attachment(flow.dst));
    if nodes.first() != Some(&from) || nodes.last() != Some(&to) {
        return Err(Error::Flow {
            flow: flow.id,
            what: format!(
                "its path must begin at node {from} and end at node {to}, where its hosts are"
            ),
        });
    }
    let mut nodes = nodes.to_vec();
    if back {
        nodes.reverse();
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_beyond_the_limit_are_refused_while_they_are_stored() {
        // Five links.
        let mut store = PathStore::new(0, 20);
        store.path = vec![7, 8];
        assert_eq!(store.keep(), Ok(()));
        assert_eq!(store.keep(), Ok(()));
        let message = store.keep().unwrap_err().to_string();
        assert!(message.contains("more than 5 links"), "{message}");
        assert_eq!((store.path(0), store.path(1)), (&[7, 8][..], &[7, 8][..]));
        // Indexes have 32 bits, however large the memory.
        assert_eq!(PathStore::new(0, u64::MAX).ports_max, u32::MAX as usize);
    }
}
