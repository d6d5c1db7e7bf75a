//! Benchmarks of copies that other projects published, with their names: nvbandwidth's copies by
//! the copy engines, and vLLM's `swap_blocks`.

use aquifer::{Buffer, Pending, Stream};
use aquifer_allocator::AccessGuard;
use aquifer_device::{AccessKind, DevicePtr, HostBuffer};
use serde::Serialize;

use super::meter::{Meter, rate};
use crate::commands::hundredths;
use crate::exit::Failure;
use crate::session::Session;
use crate::table::{Column, number, table};
use crate::text::Bytes;

/// The size of nvbandwidth's copies, in bytes.
const BANDWIDTH_BYTES: u64 = 512 << 20;

/// The sizes of blocks that are swapped, in bytes: 4 KiB to 4 MiB.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 12..=22;

/// The most blocks that are swapped at once.
const BLOCKS_MAX: usize = 256;

/// The copies of the driver alone, and ours.
const DRIVER: &str = "driver";
const TRANSFER: &str = "transfer";

/// A row of results. `transfer --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct Row {
    part: &'static str,
    device: String,
    modelled: bool,
    clock: &'static str,
    test: &'static str,
    method: &'static str,
    bytes: u64,
    copies: u64,
    us: f64,
    gb_per_s: f64,
    of_link: Option<f64>,
}

impl Row {
    fn new(
        meter: &Meter,
        part: &'static str,
        test: &'static str,
        method: &'static str,
        (copies, bytes): (u64, u64),
        ns: f64,
    ) -> Row {
        let speed = rate(copies * bytes, ns);
        Row {
            part,
            device: meter.device.clone(),
            modelled: meter.is_modelled(),
            clock: meter.clock(),
            test,
            method,
            bytes,
            copies,
            us: hundredths(ns / 1e3),
            gb_per_s: hundredths(speed),
            of_link: meter.link_gb_s.map(|limit| hundredths(speed / limit)),
        }
    }
}

fn show(session: &Session, rows: &[Row]) -> Result<(), Failure> {
    rows.iter().try_for_each(|row| session.row(row))?;
    let gb_per_s = if rows.iter().any(|row| row.modelled) { "GB/s, modelled" } else { "GB/s" };
    let columns: [Column<Row>; 6] = [
        ("test", |row| row.test.to_owned()),
        ("method", |row| row.method.to_owned()),
        ("size", |row| {
            if row.copies > 1 {
                format!("{} × {}", row.copies, Bytes(row.bytes))
            } else {
                Bytes(row.bytes).to_string()
            }
        }),
        (gb_per_s, |row| format!("{:.2}", row.gb_per_s)),
        ("of link", |row| number(row.of_link, 2)),
        ("µs", |row| format!("{:.1}", row.us)),
    ];
    session.show(table(rows, 2, &columns))
}

/// What runs at once: a direction that is measured, and whether the other one runs beside it.
const BANDWIDTH: [(&str, bool, bool); 4] = [
    ("host_to_device_memcpy_ce", true, false),
    ("device_to_host_memcpy_ce", false, false),
    ("host_to_device_bidirectional_memcpy_ce", true, true),
    ("device_to_host_bidirectional_memcpy_ce", false, true),
];

/// nvbandwidth's copies between pinned memory and the device, by the driver alone and by ours.
pub(super) fn bandwidth(session: &Session, meter: &Meter) -> Result<(), Failure> {
    let bytes = meter.most_of(BANDWIDTH_BYTES);
    let mut rows = Vec::new();
    let (mut target, mut source) = (meter.buffer(bytes)?, meter.buffer(bytes)?);
    // Memory that was never written may not be read.
    source.upload(&meter.pinned(bytes)?, &meter.transfer)?.wait()?;
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let device = meter.transfer.device();
    let mut host = [HostBuffer::new(device, len)?, HostBuffer::new(device, len)?];
    let streams = [meter.stream.clone(), device.stream()?];
    let mut enqueue = |up: bool| -> Result<(), Failure> {
        let (buffer, kind) = if up { (&target, AccessKind::Write) } else { (&source, AccessKind::Read) };
        let (stream, host) = (&streams[usize::from(up)], &mut host[usize::from(up)]);
        let _access = AccessGuard::acquire(stream, &[(buffer.storage(), kind)])?;
        let copy = if up { HostBuffer::upload } else { HostBuffer::download };
        Ok(copy(host, 0, buffer.ptr(), len, stream)?)
    };
    for (test, up, both) in BANDWIDTH {
        let ns = meter.time(|| {
            enqueue(up)?;
            if both {
                enqueue(!up)?;
            }
            Ok(streams[usize::from(up)].synchronize()?)
        })?;
        rows.push(Row::new(meter, "nvbandwidth", test, DRIVER, (1, bytes), ns));
    }
    drop(host);
    let (from, mut to) = (meter.pinned(bytes)?, meter.pinned(bytes)?);
    for (test, up, both) in BANDWIDTH {
        // Its own time counts, so the other one is waited for later.
        let mut beside: Option<Pending<()>> = None;
        let ns = meter.time(|| {
            beside.take().map(Pending::wait).transpose()?;
            let mut start = |up: bool| {
                if up { target.upload(&from, &meter.transfer) } else { source.download(&mut to, &meter.transfer) }
            };
            let measured = start(up)?;
            beside = both.then(|| start(!up)).transpose()?;
            Ok(measured.wait()?)
        })?;
        beside.map(Pending::wait).transpose()?;
        rows.push(Row::new(meter, "nvbandwidth", test, TRANSFER, (1, bytes), ns));
    }
    let less = if bytes < BANDWIDTH_BYTES { format!(", of {} there", Bytes(BANDWIDTH_BYTES)) } else { String::new() };
    session.show(format_args!("\nAs nvbandwidth: copies of {}{less}", Bytes(bytes)))?;
    rows.sort_by_key(|row| BANDWIDTH.iter().position(|(test, ..)| *test == row.test));
    show(session, &rows)
}

/// A cache of blocks on the device and one in pinned memory, and which block goes where.
struct Caches {
    device: Buffer<u8>,
    pinned: HostBuffer,
    host: Vec<u8>,
    /// Pairs of a block on the host and one on the device.
    mapping: Vec<(usize, usize)>,
    bytes: usize,
}

impl Caches {
    fn new(meter: &Meter, count: usize, len: usize) -> Result<Caches, Failure> {
        let mut device = meter.buffer((count * len) as u64)?;
        let host = vec![1; count * len];
        device.upload(host.clone(), &meter.transfer)?.wait()?;
        let pinned = HostBuffer::new(meter.transfer.device(), count * len)?;
        // No two neighbours stay neighbours, and an odd step visits each block of a power of two once.
        let mapping = (0..count).map(|block| (block, (block * 5 + 3) % count)).collect();
        Ok(Caches { device, pinned, host, mapping, bytes: len })
    }

    fn range(&self, block: usize) -> std::ops::Range<usize> {
        block * self.bytes..(block + 1) * self.bytes
    }

    /// As vLLM does it: one call of the driver each.
    fn by_driver(&mut self, stream: &Stream, up: bool) -> Result<(), Failure> {
        let kind = if up { AccessKind::Write } else { AccessKind::Read };
        let _access = AccessGuard::acquire(stream, &[(self.device.storage(), kind)])?;
        let copy = if up { HostBuffer::upload } else { HostBuffer::download };
        for &(on_host, on_device) in &self.mapping {
            let at = DevicePtr(self.device.ptr().0 + (on_device * self.bytes) as u64);
            copy(&mut self.pinned, on_host * self.bytes, at, self.bytes, stream)?;
        }
        Ok(stream.synchronize()?)
    }

    /// As one batch, with what the host packs or unpacks.
    fn batched(&mut self, meter: &Meter, up: bool) -> Result<(), Failure> {
        let mut batch = meter.transfer.batch();
        let block = |caches: &Caches, on_device| caches.device.slice(caches.range(on_device)).share();
        if up {
            for &(on_host, on_device) in &self.mapping {
                batch.upload(&self.host[self.range(on_host)], &mut block(self, on_device))?;
            }
            return Ok(batch.run()?.wait()?);
        }
        let parts = self.mapping.iter().map(|&(on_host, on_device)| {
            let part = batch.download(&block(self, on_device))?;
            Ok((self.range(on_host), part))
        });
        let parts = parts.collect::<Result<Vec<_>, Failure>>()?;
        batch.run()?.wait()?;
        for (range, part) in parts {
            self.host[range].copy_from_slice(&part.to_vec()?);
        }
        Ok(())
    }
}

/// vLLM's `swap_blocks`: scattered blocks of a cache, of 2^k bytes, both ways.
pub(super) fn swap_blocks(session: &Session, meter: &Meter) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for bytes in BLOCK_BYTES.map(|power| 1_usize << power) {
        let blocks = usize::try_from(meter.largest()).unwrap_or(usize::MAX) / bytes;
        let blocks = blocks.min(BLOCKS_MAX);
        if blocks < 8 {
            break;
        }
        let blocks = 1 << blocks.ilog2();
        let copied = (blocks as u64, bytes as u64);
        let mut caches = Caches::new(meter, blocks, bytes)?;
        for (test, up) in [("swap_blocks, in", true), ("swap_blocks, out", false)] {
            let ns = meter.time(|| caches.by_driver(&meter.stream, up))?;
            rows.push(Row::new(meter, "swap_blocks", test, DRIVER, copied, ns));
            let ns = meter.time(|| caches.batched(meter, up))?;
            rows.push(Row::new(meter, "swap_blocks", test, "batch", copied, ns));
        }
    }
    session.show("\nAs vLLM's swap_blocks: blocks of a cache, in another order; µs for all of them")?;
    show(session, &rows)
}
