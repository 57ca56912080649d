//! A router in front of two engines, inside a program:
//!
//! ```sh
//! cargo run -p slipstream-fleet --example two_engines -- http://gpu1:8000 http://gpu2:8000
//! ```

use std::io::Read;

use slipstream_config::cluster::file;
use slipstream_config::doc::Doc;
use slipstream_fleet::{Bound, RouterOptions, RouterServer};

/// Serves OpenAI clients on `listen` from the engines `urls`.
pub(crate) fn serve(listen: &str, urls: &[String]) -> anyhow::Result<RouterServer> {
    // The keys of docs/cluster-file.md: policy, limits, TLS and much else have defaults.
    let text = format!("[pool.main]\nengines = {urls:?}\n");
    let doc = Doc::parse("two engines", text.as_bytes());
    let (cluster, _) = file::read(doc, |path| std::fs::read(path))?;
    RouterServer::start(&cluster, Bound::bind(listen)?, RouterOptions::default())
}

#[allow(clippy::print_stdout, dead_code)] // a test includes this file
fn main() -> anyhow::Result<()> {
    let urls: Vec<String> = std::env::args().skip(1).collect();
    let router = serve("127.0.0.1:8080", &urls)?;
    println!("{} on http://{}", router.summary(), router.address());
    std::io::stdin().read_to_end(&mut Vec::new())?; // until Ctrl-D
    router.shutdown();
    Ok(())
}
