//! Settings of a cluster file that a live cluster cannot follow, or does not need.

use slipstream_config::cluster::{Cluster, HostMode, NetworkMode};

/// Refuses settings of a router or network that a live cluster cannot follow.
///
/// # Errors
/// Names each of them, and how to run without it.
pub fn refuse_simulated(cluster: &Cluster) -> anyhow::Result<()> {
    let mut refused = Vec::new();
    let models = cluster.models().len();
    if models > 1 {
        refused.push(format!(
            "the pools serve {} models ({}), which is for simulation; live, a server has one: run one for each model, \
             with a file of its pools",
            models,
            cluster.model_names()
        ));
    }
    let mut refuse = |asked: bool, message: &str| {
        if asked {
            refused.push(message.to_owned());
        }
    };
    refuse(
        cluster.router.kv_lag_ms > 0.0,
        "`router.kv_lag_ms` delays KV events in simulation; a live router applies them when they \
         arrive: run with `--set router.kv_lag_ms=0`",
    );
    refuse(
        cluster.network.messages,
        "`network.messages` sends requests and answers over the modelled network; live they cross the \
         network between the processes: run with `--set network.messages=false`",
    );
    refuse(
        cluster.network.mode == NetworkMode::Packets,
        "`network.mode = \"packets\"` is for simulation; live, transfers take the time of the flow model: run with \
         `--set network.mode=flows`",
    );
    refuse(
        cluster.network.gpus_per_host > 0,
        "`network.gpus_per_host` puts simulated workers on hosts; live, each engine is where it is: run with \
         `--set network.gpus_per_host=0`",
    );
    refuse(
        cluster
            .pools
            .iter()
            .any(|pool| pool.engine.peer_tier.is_some()),
        "[engine.peer_tier] is for simulation; live, the KV connector of real engines fetches blocks from peers: run with \
         `--set engine.peer_tier.enabled=false`",
    );
    refuse(
        cluster
            .pools
            .iter()
            .any(|pool| pool.engine.data_parallel_barrier),
        "`engine.data_parallel_barrier` is for simulation; live, each rank begins its steps by itself: run with \
         `--set engine.data_parallel_barrier=false`",
    );
    refuse(
        cluster
            .pools
            .iter()
            .any(|pool| pool.engine.encoder.is_some()),
        "[engine.encoder] is for simulation; live, images take the time of their tokens: run with \
         `--set engine.encoder.enabled=false`",
    );
    if refused.is_empty() {
        return Ok(());
    }
    anyhow::bail!(
        "a live cluster cannot follow its file: {}",
        refused.join("; ")
    )
}

/// Settings of `cluster` that describe simulated hosts and faults, as named in a cluster file. A live cluster has hosts
/// and faults of its own.
pub fn simulation_only(cluster: &Cluster) -> Vec<String> {
    let mut settings = Vec::new();
    match cluster.events.len() {
        0 => {}
        1 => settings.push("the [[event]] of the cluster file".to_owned()),
        events => settings.push(format!(
            "each of the {events} [[event]] of the cluster file"
        )),
    }
    if cluster.host.mode != HostMode::None {
        settings.push("`host.mode`".to_owned());
    }
    settings
}

#[cfg(test)]
mod tests {
    use slipstream_config::cluster::file;
    use slipstream_config::doc::Doc;

    use super::*;

    fn cluster(text: &str) -> Cluster {
        let doc = Doc::parse("c.toml", text.as_bytes());
        file::read(doc, |path| std::fs::read(path))
            .expect("a cluster file")
            .0
    }

    #[test]
    fn simulated_hosts_and_faults_are_named() {
        assert_eq!(simulation_only(&cluster("")), Vec::<String>::new());
        let text = "[router]\nqueue_max = 5\n[host]\nmode = \"ideal\"\n";
        assert_eq!(simulation_only(&cluster(text)), ["`host.mode`"]);
        assert!(refuse_simulated(&cluster(text)).is_ok());
    }

    #[test]
    fn what_a_live_router_or_network_cannot_do_is_refused_at_once() {
        let both = "[router]\nkv_lag_ms = 2\n[network]\nmode = \"flows\"\nmessages = true\n";
        let message = refuse_simulated(&cluster(both)).unwrap_err().to_string();
        for part in ["router.kv_lag_ms", "network.messages", "--set"] {
            assert!(message.contains(part), "{message}");
        }
        let lag = refuse_simulated(&cluster("[router]\nkv_lag_ms = 2\n")).unwrap_err();
        assert!(!lag.to_string().contains("network.messages"), "{lag}");
        let packets = refuse_simulated(&cluster("[network]\nmode = \"packets\"\n")).unwrap_err();
        let packets = packets.to_string();
        assert!(packets.contains("--set network.mode=flows"), "{packets}");
        let hosts = "[network]\nmode = \"flows\"\ngpus_per_host = 8\n";
        let hosts = refuse_simulated(&cluster(hosts)).unwrap_err().to_string();
        assert!(hosts.contains("--set network.gpus_per_host=0"), "{hosts}");
        let peers = refuse_simulated(&cluster("[engine.peer_tier]\nenabled = true\n")).unwrap_err();
        let peers = peers.to_string();
        assert!(
            peers.contains("--set engine.peer_tier.enabled=false"),
            "{peers}"
        );
        let ranks = "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\n\
                     data_parallel_size = 2\ndata_parallel_barrier = true\n";
        let ranks = refuse_simulated(&cluster(ranks)).unwrap_err().to_string();
        let mended = "--set engine.data_parallel_barrier=false";
        assert!(ranks.contains(mended), "{ranks}");
        let encoder = "[engine.encoder]\nenabled = true\ntoken_us = 5\n";
        let encoder = refuse_simulated(&cluster(encoder)).unwrap_err().to_string();
        assert!(
            encoder.contains("--set engine.encoder.enabled=false"),
            "{encoder}"
        );
    }
}
