//! `/metrics` of a process without clients: one thread, many connections.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use slipstream_metrics::Format;
use slipstream_metrics::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Longest head of a request, bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Time limit for a client to send its request, and again to read the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Connections that are open at a time. Another one takes the place of the oldest, so that clients that say
/// nothing keep no scraper out.
const CONNECTIONS_MAX: usize = 64;

/// Serves `registry` on `listen` for as long as the process runs. Returns the address.
///
/// # Errors
/// The address cannot be bound, or the thread cannot be started.
pub fn serve(listen: &str, registry: Registry) -> anyhow::Result<SocketAddr> {
    let context = || format!("--metrics {listen}: use an address of this host, host:port");
    let listener = std::net::TcpListener::bind(listen).with_context(context)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || runtime.block_on(accept(listener, Arc::new(registry))))?;
    Ok(address)
}

async fn accept(listener: std::net::TcpListener, registry: Arc<Registry>) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "the socket of --metrics cannot be polled");
            return;
        }
    };
    let mut open: VecDeque<JoinHandle<()>> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                open.retain(|connection| !connection.is_finished());
                if open.len() >= CONNECTIONS_MAX
                    && let Some(oldest) = open.pop_front()
                {
                    oldest.abort();
                }
                let registry = registry.clone();
                open.push_back(tokio::spawn(async move {
                    // A scraper that disconnects is no error.
                    let _ = answer(stream, &registry).await;
                }));
            }
            // Usually out of descriptors.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

async fn answer(mut stream: TcpStream, registry: &Registry) -> io::Result<()> {
    let head = tokio::time::timeout(PATIENCE, read_head(&mut stream)).await??;
    let (status, kind, body) = if head.starts_with(b"GET /metrics ") {
        let format = Format::accepted(accepted(&head).as_deref());
        let page = format.page(registry).map_err(io::Error::other)?;
        ("200 OK", format.content_type(), page)
    } else {
        let hint = "this process serves GET /metrics, and nothing else\n";
        ("404 Not Found", "text/plain", hint.to_owned())
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    tokio::time::timeout(PATIENCE, async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    })
    .await?
}

/// The header `Accept` of a request; several lines of it are one list (RFC 9110, section 5.3).
fn accepted(head: &[u8]) -> Option<String> {
    let lines = head.split(|&byte| byte == b'\n').skip(1);
    let values = lines.filter_map(|line| {
        let (name, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
        name.eq_ignore_ascii_case("accept").then(|| value.trim())
    });
    values
        .map(str::to_owned)
        .reduce(|all, next| format!("{all},{next}"))
}

/// Reads up to the empty line, or the limit.
async fn read_head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut bytes = [0; 1024];
    while !head.windows(4).any(|four| four == b"\r\n\r\n") && head.len() < HEAD_BYTES_MAX {
        match stream.read(&mut bytes).await? {
            0 => break,
            read => head.extend_from_slice(&bytes[..read]),
        }
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn clients_that_say_nothing_keep_no_scraper_out() {
        let address = serve("127.0.0.1:0", Registry::default()).unwrap();
        // More than there are places, and none speaks.
        let silent: Vec<TcpStream> = (0..2 * CONNECTIONS_MAX)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        for path in ["/metrics", "/"] {
            let mut scraper = TcpStream::connect(address).unwrap();
            write!(scraper, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
            let mut answer = String::new();
            scraper.read_to_string(&mut answer).unwrap();
            let status = if path == "/" { "404" } else { "200" };
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
        drop(silent);
    }

    #[test]
    fn the_header_accept_is_found() {
        let head =
            b"GET /metrics HTTP/1.1\r\nHost: a\r\naccept: text/plain;q=0.1\r\nACCEPT: x/y\r\n\r\n";
        assert_eq!(accepted(head).as_deref(), Some("text/plain;q=0.1,x/y"));
        assert_eq!(accepted(b"GET /metrics HTTP/1.1\r\n\r\n"), None);
    }
}
