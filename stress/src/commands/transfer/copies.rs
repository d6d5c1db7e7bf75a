//! Bandwidth and latency of every method of copying.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use aquifer::transfer::{FilePart, Owner, Region};
use aquifer::{Buffer, PinnedBuffer};
use aquifer_allocator::AccessGuard;
use aquifer_device::AccessKind;
use serde::Serialize;

use super::meter::{HOST, Meter, Peer, rate};
use crate::commands::{hundredths, kind_of_time};
use crate::exit::Failure;
use crate::session::Session;
use crate::table::{Column, in_terminal, table};
use crate::text::Bytes;

/// Rows of the methods `rows` and `staged rows`, in bytes.
const ROW: usize = 4 << 10;

/// A row of results. `transfer --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct Row {
    part: &'static str,
    device: String,
    modelled: bool,
    clock: &'static str,
    peer: Option<String>,
    route: Option<String>,
    direction: &'static str,
    method: &'static str,
    bytes: u64,
    us: f64,
    gb_per_s: f64,
    of_driver_pinned: Option<f64>,
}

/// The memory for copies of one size.
struct Ends {
    /// Twice as long as the copy, for rows with gaps.
    pinned: PinnedBuffer<u8>,
    /// The destination of copies on the host.
    aside: PinnedBuffer<u8>,
    /// Twice as long, too.
    ordinary: Vec<u8>,
    /// Twice as long, too.
    shared: Arc<[u8]>,
    buffer: Buffer<u8>,
    /// Twice as long, too.
    other: Buffer<u8>,
    /// Memory of another device, twice as long.
    peer: Option<Buffer<u8>>,
    file: Option<Temporary>,
}

type Method = (&'static str, &'static str, fn(&Meter, &mut Ends) -> Result<(), Failure>);

/// The first method of a direction is the reference for the others.
const METHODS: &[Method] = &[
    ("upload", "driver pinned", |meter, ends| {
        let _access = AccessGuard::acquire(&meter.stream, &[(ends.buffer.storage(), AccessKind::Write)])?;
        let from = ends.pinned.slice(..ends.len()).read()?;
        Ok(meter.stream.upload_blocking(ends.buffer.ptr(), &from)?)
    }),
    ("upload", "driver pageable", |meter, ends| {
        let _access = AccessGuard::acquire(&meter.stream, &[(ends.buffer.storage(), AccessKind::Write)])?;
        Ok(meter.stream.upload_blocking(ends.buffer.ptr(), &ends.ordinary[..ends.len()])?)
    }),
    ("upload", "pinned", |meter, ends| {
        let from = ends.pinned.slice(..ends.len());
        Ok(meter.transfer.upload(from, &mut ends.buffer)?.wait()?)
    }),
    ("upload", "staged", |meter, ends| {
        let from = Owner::new(FirstHalf(ends.shared.clone()));
        Ok(meter.transfer.upload(from, &mut ends.buffer)?.wait()?)
    }),
    ("upload", "staged rows", |meter, ends| {
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[2 * ROW, 1], to_strides: &[ROW, 1] };
        Ok(meter.transfer.upload(region.of(ends.shared.clone()), &mut ends.buffer)?.wait()?)
    }),
    ("upload", "rows", |meter, ends| {
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[2 * ROW, 1], to_strides: &[ROW, 1] };
        Ok(meter.transfer.upload(region.of(&ends.pinned), &mut ends.buffer)?.wait()?)
    }),
    ("upload", "file", |meter, ends| {
        let Some(file) = &ends.file else { return Ok(()) };
        meter.transfer.upload(FilePart::new(file.path()), &mut ends.buffer)?.wait()?;
        Ok(())
    }),
    ("download", "driver pinned", |meter, ends| {
        let _access = AccessGuard::acquire(&meter.stream, &[(ends.buffer.storage(), AccessKind::Read)])?;
        let mut to = ends.pinned.slice_mut(..ends.len());
        Ok(meter.stream.download_blocking(&mut to.write()?, ends.buffer.ptr())?)
    }),
    ("download", "driver pageable", |meter, ends| {
        let _access = AccessGuard::acquire(&meter.stream, &[(ends.buffer.storage(), AccessKind::Read)])?;
        let len = ends.len();
        Ok(meter.stream.download_blocking(&mut ends.ordinary[..len], ends.buffer.ptr())?)
    }),
    ("download", "pinned", |meter, ends| {
        let to = ends.pinned.slice_mut(..ends.len());
        Ok(meter.transfer.download(&ends.buffer, to)?.wait()?)
    }),
    ("download", "staged", |meter, ends| {
        let len = ends.len();
        Ok(meter.transfer.download_blocking(&ends.buffer, &mut ends.ordinary[..len])?)
    }),
    ("download", "staged rows", |meter, ends| {
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[ROW, 1], to_strides: &[2 * ROW, 1] };
        let to = std::mem::take(&mut ends.ordinary);
        ends.ordinary = meter.transfer.download(&ends.buffer, region.of(to))?.wait()?;
        Ok(())
    }),
    ("download", "rows", |meter, ends| {
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[ROW, 1], to_strides: &[2 * ROW, 1] };
        Ok(meter.transfer.download(&ends.buffer, region.of(&mut ends.pinned))?.wait()?)
    }),
    ("on device", "copy", |meter, ends| {
        let len = ends.len();
        meter.transfer.copy(&ends.buffer, &mut ends.other.slice_mut(..len))?.wait()?;
        Ok(())
    }),
    ("on device", "rows", |meter, ends| {
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[ROW, 1], to_strides: &[2 * ROW, 1] };
        meter.transfer.copy(region.of(&ends.buffer), &mut ends.other)?.wait()?;
        Ok(())
    }),
    (PEER, "copy", |meter, ends| {
        let Some(from) = &ends.peer else { return Ok(()) };
        meter.transfer.copy(&from.slice(..ends.len()), &mut ends.buffer)?.wait()?;
        Ok(())
    }),
    (PEER, "rows", |meter, ends| {
        let Some(from) = &ends.peer else { return Ok(()) };
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[2 * ROW, 1], to_strides: &[ROW, 1] };
        meter.transfer.copy(region.of(from), &mut ends.buffer)?.wait()?;
        Ok(())
    }),
    (ON_HOST, "copy", |meter, ends| {
        let from = ends.pinned.slice(..ends.len());
        Ok(meter.transfer.copy_on_host(from, &mut ends.aside)?.wait()?)
    }),
    (ON_HOST, "rows", |meter, ends| {
        let region = Region { extents: &[ends.len() / ROW, ROW], from_strides: &[2 * ROW, 1], to_strides: &[ROW, 1] };
        Ok(meter.transfer.copy_on_host(region.of(&ends.pinned), &mut ends.aside)?.wait()?)
    }),
];

/// The direction of copies from the memory of another device.
const PEER: &str = "from peer";

/// The direction of copies by the calling thread, on every device.
const ON_HOST: &str = "on host";

/// Methods with work of the host, which has no cost on a simulated device.
const HOST_METHODS: [&str; 3] = ["staged", "staged rows", "file"];

pub(super) fn run(session: &Session, meter: &Meter) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for bytes in meter.sizes() {
        let mut ends = Ends::new(meter, bytes)?;
        let mut yardstick = ("", 0.0);
        for &(direction, method, copy) in METHODS {
            let is_left_out = meter.is_modelled() && HOST_METHODS.contains(&method);
            if is_left_out || (direction == PEER && ends.peer.is_none()) {
                continue;
            }
            let by_host = direction == ON_HOST;
            let ns = if by_host {
                meter.time_on_host(|| Ok(()), || copy(meter, &mut ends))?
            } else {
                meter.time(|| copy(meter, &mut ends))?
            };
            let peer = meter.peer.as_ref().filter(|_| direction == PEER);
            let speed = rate(bytes, ns);
            if method == "driver pinned" {
                yardstick = (direction, speed);
            }
            let compared = yardstick.0 == direction && method != "driver pinned" && yardstick.1 > 0.0;
            let row = Row {
                part: "copies",
                device: meter.device.clone(),
                modelled: meter.is_modelled() && !by_host,
                clock: if by_host { HOST } else { meter.clock() },
                peer: peer.map(|peer| peer.name.clone()),
                route: peer.map(|peer| peer.route.to_string()),
                direction,
                method,
                bytes,
                us: hundredths(ns / 1e3),
                gb_per_s: hundredths(speed),
                of_driver_pinned: compared.then(|| hundredths(speed / yardstick.1)),
            };
            session.row(&row)?;
            rows.push(row);
        }
    }
    let columns: [Column<Row>; 7] = [
        ("direction", |row| row.direction.to_owned()),
        ("method", |row| row.method.to_owned()),
        ("size", |row| Bytes(row.bytes).to_string()),
        ("µs", |row| format!("{:.1}", row.us)),
        ("GB/s", |row| format!("{:.2}", row.gb_per_s)),
        ("of driver pinned", |row| row.of_driver_pinned.map_or(String::new(), |share| format!("{share:.2}"))),
        ("times", |row| kind_of_time(row.modelled)),
    ];
    session.show("Copies by every method; the driver's of pinned memory are the reference")?;
    let table = table(&rows, 2, &columns);
    let notes = [meter.peer.as_ref().map(in_words), meter.is_modelled().then(|| BY_HOST.to_owned())];
    let notes: String = notes.into_iter().flatten().map(|note| in_terminal(&note) + "\n").collect();
    session.show(format_args!("{table}\n{notes}"))
}

/// A note about the clocks of the rows.
const BY_HOST: &str = "Copies on the host are timed by its own clock, all others in the virtual time of the device.";

/// The origin of copies from a peer, in words.
fn in_words(peer: &Peer) -> String {
    format!("Copies from a peer come from {}, and go {}.", peer.name, peer.route)
}

impl Ends {
    fn new(meter: &Meter, bytes: u64) -> Result<Ends, Failure> {
        let len = usize::try_from(2 * bytes).unwrap_or(usize::MAX);
        let ordinary: Vec<u8> = (0..=250u8).cycle().take(len).collect();
        let file = if meter.is_modelled() { None } else { Some(Temporary::new(&ordinary[..len / 2])?) };
        Ok(Ends {
            pinned: meter.pinned(2 * bytes)?,
            aside: meter.pinned(bytes)?,
            shared: ordinary.as_slice().into(),
            ordinary,
            buffer: meter.buffer(bytes)?,
            other: meter.buffer(2 * bytes)?,
            peer: meter
                .peer
                .as_ref()
                .filter(|peer| bytes <= peer.most)
                .map(|peer| peer.buffer(2 * bytes))
                .transpose()?,
            file,
        })
    }

    /// The number of bytes copied.
    fn len(&self) -> usize {
        self.ordinary.len() / 2
    }
}

/// The first half of shared memory.
struct FirstHalf(Arc<[u8]>);

impl AsRef<[u8]> for FirstHalf {
    fn as_ref(&self) -> &[u8] {
        &self.0[..self.0.len() / 2]
    }
}

/// A file for the length of a measurement. On Linux it has no name, so nothing stays of it,
/// whatever ends the program.
pub(super) struct Temporary {
    /// Where it was made.
    path: PathBuf,
    pub(super) file: File,
}

impl Temporary {
    fn new(content: &[u8]) -> Result<Temporary, Failure> {
        let own = Temporary::create(&content.len().to_string())?;
        (&own.file).write_all(content).and_then(|()| own.file.sync_all()).map_err(|cause| own.failed(cause))?;
        Ok(own)
    }

    /// An empty file, open for reading and writing.
    pub(super) fn create(name: &str) -> Result<Temporary, Failure> {
        let path = std::env::temp_dir().join(format!("aquifer-stress-{}-{name}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let own = match file {
            Ok(file) => Temporary { path, file },
            Err(cause) => return Err(Failure::File { path, cause }),
        };
        if cfg!(target_os = "linux") {
            std::fs::remove_file(&own.path).map_err(|cause| own.failed(cause))?;
        }
        Ok(own)
    }

    /// A path by which this process can open it.
    pub(super) fn path(&self) -> PathBuf {
        #[cfg(target_os = "linux")]
        return PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.file)));
        #[cfg(not(target_os = "linux"))]
        self.path.clone()
    }

    pub(super) fn failed(&self, cause: std::io::Error) -> Failure {
        Failure::File { path: self.path.clone(), cause }
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Temporary {
    fn drop(&mut self) {
        // An error is harmless: the file is in the folder of temporary files.
        let _ = std::fs::remove_file(&self.path);
    }
}
