//! Background traffic: the flows of a file of `slipstream net run`, beside the cluster's own.

use std::io;
use std::path::Path;

use slipstream_base::text::counted;
use slipstream_config::cluster::{Cluster, PoolConfig};
use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Resources};
use slipstream_netsim::scenario::{Flow, Paths, Transport};

use super::RETRY_NS;
use crate::run::TwinError;

/// Memory that its flows may take, bytes.
const MEMORY_BYTES_MAX: u64 = 1 << 30;

/// The flows of `network.background`; none without that key. Hosts are network interfaces of the cluster.
///
/// # Errors
/// [`TwinError::Background`].
pub(crate) fn read(
    cluster: &Cluster,
    read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<Vec<Flow>, TwinError> {
    let Some(path) = &cluster.network.background else {
        return Ok(Vec::new());
    };
    let refuse = |cause: String| TwinError::Background { cause };
    let text = read(path).map_err(|error| {
        refuse(format!(
            "{}: {error}; paths are relative to the folder of the cluster file",
            path.display()
        ))
    })?;
    let open = |path: &Path| -> Result<Box<dyn io::BufRead>, String> {
        let text = read(path).map_err(|error| error.to_string())?;
        Ok(Box::new(io::Cursor::new(text)))
    };
    let resources = Resources {
        open: &open,
        memory_bytes_max: MEMORY_BYTES_MAX,
    };
    let doc = Doc::parse(&path.to_string_lossy(), &text);
    let config = config::read_with(doc, &resources).map_err(|error| refuse(error.to_string()))?;
    let nics = |(_, pool): (_, &PoolConfig)| u64::from(cluster.network.nics(pool.engine.gpus()));
    let hosts = cluster.workers().map(nics).sum::<u64>() + 1;
    let mut flows = config.scenario.flows;
    for flow in &mut flows {
        let of = flow.id;
        if let Some(host) = [flow.src, flow.dst]
            .into_iter()
            .find(|host| u64::from(*host) >= hosts)
        {
            return Err(refuse(format!(
                "{}: flow {of} has host {host}, and the cluster has {} (those of all workers, and the frontend's), numbered from \
                 0; give it one of these",
                path.display(),
                counted(hosts, "network interface")
            )));
        }
        if matches!(flow.paths, Paths::Explicit(_)) {
            return Err(refuse(format!(
                "{}: flow {of} has a path of its own, and the switches are those of the cluster file; remove its path",
                path.display()
            )));
        }
        // Ports have one queue, and transfers fill it that the file knows nothing of.
        (flow.class, flow.answer_class, flow.collective) = (0, 0, None);
        match &mut flow.transport {
            Transport::Roce(roce) => roce.retry_ns = roce.retry_ns.or(Some(RETRY_NS)),
            Transport::Ndp(ndp) => ndp.retry_ns = ndp.retry_ns.or(Some(RETRY_NS)),
            _ => {}
        }
    }
    Ok(flows)
}
