//! The listening socket of a server: bound by the server, or passed by a service manager.

use anyhow::Context;
use slipstream_config::cluster::LiveConfig;
use slipstream_frontend::Bound;

/// Binds the address to listen on, or takes the socket of a service manager (`LISTEN_FDS`), if there is one.
///
/// # Errors
/// The address cannot be bound, or what the service manager passed is not one listening TCP socket.
pub fn bind(live: &LiveConfig) -> anyhow::Result<Bound> {
    let count = inherited_sockets()?;
    match count {
        0 if live.reuse_port => Ok(Bound::bind_shared(&live.listen)?),
        0 => Ok(Bound::bind(&live.listen)?),
        1 => {
            let mut given = listenfd::ListenFd::from_env();
            let socket = given.take_tcp_listener(0).context(
                "the socket from the service manager (LISTEN_FDS) is no TCP socket; use \
                 `ListenStream=HOST:PORT` in its unit",
            )?;
            let bound = Bound::inherited(socket.context("it was taken already")?)?;
            tracing::info!(
                "listening on the socket of the service manager, {}, instead of `live.listen`",
                bound.address()
            );
            Ok(bound)
        }
        count => anyhow::bail!(
            "the service manager passed {count} sockets (LISTEN_FDS); pass one: one `ListenStream` in one unit"
        ),
    }
}

/// Number of sockets that a service manager passed to this process (sd_listen_fds(3)). Variables that it cannot
/// have written are errors, as in systemd's own library: a server on another address would look started.
fn inherited_sockets() -> anyhow::Result<u32> {
    let Some(count) = std::env::var_os("LISTEN_FDS") else {
        return Ok(0);
    };
    if let Some(pid) = std::env::var_os("LISTEN_PID").filter(|pid| !pid.is_empty()) {
        // Inherited from a process for which they were meant.
        if number("LISTEN_PID", &pid)? != std::process::id() {
            return Ok(0);
        }
    }
    if let Some(first) = std::env::var_os("LISTEN_FDS_FIRST_FD") {
        number("LISTEN_FDS_FIRST_FD", &first)?;
    }
    number("LISTEN_FDS", &count)
}

/// The value of an environment variable of a service manager.
fn number(name: &str, value: &std::ffi::OsStr) -> anyhow::Result<u32> {
    let number = value.to_str().and_then(|value| value.parse::<u32>().ok());
    // Descriptors are `int`s.
    number.filter(|&number| i32::try_from(number).is_ok()).with_context(|| {
        let value: String = value.to_string_lossy().chars().take(40).collect();
        format!(
            "{name} is {value:?}, which is no number from 0 to {}; a service manager sets it for a socket unit: \
             unset it to listen on `live.listen`",
            i32::MAX
        )
    })
}
