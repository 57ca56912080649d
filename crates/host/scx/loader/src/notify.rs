//! Notifies systemd that the scheduler runs: datagrams to the socket in `NOTIFY_SOCKET`.
//!
//! Source: systemd's `sd_notify(3)`. Without the variable nothing is sent; a failure to send is
//! ignored, because the scheduler does not depend on a service manager.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Reports that the scheduler is attached.
pub fn ready(status: &str) {
    send(&format!("READY=1\nSTATUS={status}"));
}

/// Sets the line that `systemctl status` shows.
pub fn status(status: &str) {
    send(&format!("STATUS={status}"));
}

/// Reports that the loader is about to end.
pub fn stopping() {
    send("STOPPING=1");
}

fn send(message: &str) {
    if let Some(name) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = send_to(&name, message);
    }
}

fn send_to(name: &OsStr, message: &str) -> std::io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(socket: &UnixDatagram, name: &OsStr) {
        send_to(name, "READY=1\nSTATUS=4 CPUs").unwrap();
        let mut buffer = [0; 64];
        let n = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"READY=1\nSTATUS=4 CPUs");
    }

    #[test]
    fn both_kinds_of_socket_names_are_understood() {
        let path = std::env::temp_dir().join(format!("slipstream-notify-{}", std::process::id()));
        check(&UnixDatagram::bind(&path).unwrap(), path.as_os_str());
        std::fs::remove_file(&path).unwrap();
        assert!(
            send_to(path.as_os_str(), "x").is_err(),
            "no process listens"
        );
        let name = format!("slipstream-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        check(&socket, OsStr::new(&format!("@{name}")));
    }
}
