//! The blocks that had an address, one after the other: for pointers that outlive their memory.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use super::allowance::Allowance;
use super::error::{Fault, InputError, Reason};
use super::program::Site;
use super::snapshot::{Action, Entry, Snapshot};
use super::sniff::{self, Format};
use super::{gzip, json, structure, unpickle};
use crate::headline::headline;

/// An entry of the history, from 1, and its time in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Moment {
    pub entry: u64,
    pub time_us: u64,
}

/// A block that had an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The device's ordinal in the file.
    pub device: u32,
    /// Where the block began.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// The stream that it was allocated for.
    pub stream: u64,
    /// Its tag.
    pub tag: Option<String>,
    /// What stands for its call stack.
    pub place: String,
    /// When it was allocated; `None` before the history begins.
    pub from: Option<Moment>,
    /// When it was given back; `None` if it was live in the end.
    pub to: Option<Moment>,
    /// When its memory was unmapped or went back to the device, before another block had the address.
    pub unmapped: Option<Moment>,
}

/// The blocks that had an address, by device, oldest first, as a snapshot tells.
///
/// # Errors
/// As [`super::load`]; a recording that is no snapshot has no addresses.
pub fn owners(path: &Path, address: u64) -> Result<Vec<Owner>, InputError> {
    let read = || {
        let allowance = Allowance::default();
        let content = Box::new(allowance.stored(File::open(path).map_err(|error| Fault::file(Reason::Io(error)))?));
        let (format, content) = sniff::open(path, gzip::open(content, &allowance)?)?;
        let content = BufReader::new(allowance.content(content));
        let (top, mut arena) = match format {
            Format::Pickle => unpickle::run(content, &allowance)?,
            Format::Json => json::parse(content, &allowance)?,
            _ => return Err(Fault::file(Reason::NotASnapshot { found: "a recording without addresses".into() })),
        };
        Ok(owners_in(&structure::snapshot(top, &mut arena, &allowance)?, address))
    };
    read().map_err(|fault| fault.at(path))
}

fn owners_in(snapshot: &Snapshot, address: u64) -> Vec<Owner> {
    let has = |start: u64, bytes: u64| (start..start.saturating_add(bytes)).contains(&address);
    let owner = |device, (start, bytes, stream), site: Site, from| Owner {
        device,
        start,
        bytes,
        stream,
        tag: snapshot.labels.text(site.tag).map(str::to_owned),
        place: headline(&snapshot.labels, site.stack),
        from,
        to: None,
        unmapped: None,
    };
    let mut all: Vec<Owner> = Vec::new();
    for (device, trace) in (0_u32..).zip(&snapshot.traces) {
        let first = all.len();
        for (entry, &Entry { action, addr, size, stream, time_us, site, .. }) in (1..).zip(trace) {
            let (Some(start), Some(bytes)) = (addr, size) else { continue };
            if !has(start, bytes) {
                continue;
            }
            let now = Some(Moment { entry, time_us });
            match action {
                Action::Alloc => {
                    all[first..].iter_mut().for_each(|owner| owner.to = owner.to.or(now));
                    all.push(owner(device, (start, bytes, stream), site, now));
                }
                Action::FreeRequested | Action::FreeCompleted => match all[first..].last_mut() {
                    Some(last) => last.to = last.to.or(now),
                    None => all.push(Owner { to: now, ..owner(device, (start, bytes, stream), Site::default(), None) }),
                },
                Action::SegmentFree => {
                    all[first..].last_mut().into_iter().for_each(|last| last.unmapped = last.unmapped.or(now));
                }
                _ => {}
            }
        }
    }
    // Live blocks without an entry are from before the history.
    for segment in &snapshot.segments {
        let device = u32::try_from(segment.device).unwrap_or(u32::MAX);
        let is_known = |start| all.iter().any(|one| one.device == device && one.start == start && one.to.is_none());
        let found = segment.allocated.iter().find(|&&(start, bytes, _)| has(start, bytes) && !is_known(start));
        let found = found.map(|&(start, bytes, site)| owner(device, (start, bytes, segment.stream), site, None));
        all.extend(found);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_follow_each_other_from_before_the_history_to_its_end() {
        let json = r#"{"segments": [{"device": 0, "stream": 3, "address": 4096, "blocks": [
            {"address": 4096, "size": 512, "requested_size": 512, "state": "active_allocated"}]}],
            "device_traces": [[
            {"action": "free_requested", "addr": 8192, "size": 1024, "stream": 7, "time_us": 5},
            {"action": "free_completed", "addr": 8192, "size": 1024, "stream": 7, "time_us": 6},
            {"action": "alloc", "addr": 8704, "size": 512, "stream": 7, "time_us": 7, "user_metadata": "kv"},
            {"action": "alloc", "addr": 12288, "size": 512, "stream": 7, "time_us": 8},
            {"action": "free_completed", "addr": 8704, "size": 512, "stream": 7, "time_us": 9},
            {"action": "segment_unmap", "addr": 8192, "size": 4096, "stream": 7, "time_us": 10}]]}"#;
        let path = std::env::temp_dir().join(format!("aquifer-owners-{}.json", std::process::id()));
        std::fs::write(&path, json).unwrap();
        let said = |address| {
            let all = owners(&path, address).unwrap().into_iter();
            let entry = |moment: Option<Moment>| moment.map(|moment| moment.entry);
            all.map(|one| (one.start, one.tag, [one.from, one.to, one.unmapped].map(entry))).collect::<Vec<_>>()
        };
        let kv = (8704, Some("kv".to_owned()), [Some(3), Some(5), Some(6)]);
        assert_eq!(said(8800), [(8192, None, [None, Some(1), None]), kv]);
        assert_eq!(said(8192), [(8192, None, [None, Some(1), Some(6)])]);
        assert_eq!(said(4607), [(4096, None, [None; 3])]);
        assert_eq!((said(4608), said(12799)), (vec![], vec![(12288, None, [Some(4), None, None])]));
        std::fs::write(&path, "a 0 512 0\n").unwrap();
        assert!(owners(&path, 0).unwrap_err().to_string().contains("without addresses"));
        std::fs::remove_file(path).unwrap();
    }
}
