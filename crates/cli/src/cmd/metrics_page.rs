//! `/metrics` of a process without clients: one thread, one request at a time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use prometheus_client::registry::Registry;

/// Longest head of a request, bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Time limit for a client to send its request and to read the answer, because other clients wait.
const PATIENCE: Duration = Duration::from_secs(2);

/// Serves `registry` on `listen` for as long as the process runs. Returns the address.
pub(crate) fn serve(listen: &str, registry: Registry) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(listen)
        .with_context(|| format!("--metrics {listen}: use an address of this host, host:port"))?;
    let address = listener.local_addr()?;
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || {
            for stream in listener.incoming() {
                match stream {
                    // A scraper that disconnects is no error.
                    Ok(stream) => drop(answer(stream, &registry)),
                    // Usually out of descriptors.
                    Err(_) => std::thread::sleep(Duration::from_millis(20)),
                }
            }
        })?;
    Ok(address)
}

fn answer(mut stream: TcpStream, registry: &Registry) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let head = read_head(&mut stream)?;
    let (status, kind, body) = if head.starts_with(b"GET /metrics ") {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry)
            .map_err(std::io::Error::other)?;
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        ("200 OK", kind, text)
    } else {
        let hint = "this process serves GET /metrics, and nothing else\n";
        ("404 Not Found", "text/plain", hint.to_owned())
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Reads up to the empty line, or the limit.
fn read_head(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let began = Instant::now();
    let mut head = Vec::new();
    let mut bytes = [0; 1024];
    while !head.windows(4).any(|four| four == b"\r\n\r\n") && head.len() < HEAD_BYTES_MAX {
        let left = PATIENCE.saturating_sub(began.elapsed());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes)? {
            0 => break,
            read => head.extend_from_slice(&bytes[..read]),
        }
    }
    Ok(head)
}
