//! Recordings in a zip archive, such as those of several ranks, or one that `torch.save` wrote.

use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ZipArchive};

use super::error::{Fault, Reason};
use super::layers::{Content, Decoder, whole};
use super::program::Program;
use super::{Origin, parse_inside, sniff};

const WHAT: &str = "zip";

/// Reads all recordings; other files are left out and noted.
pub(super) fn programs(content: Content<'_>, origin: &Origin<'_>) -> Result<Vec<Program>, Fault> {
    let bytes = whole(content, origin.allowance)?;
    let mut recordings = Vec::new();
    let (mut others, mut why) = (0_u64, None);
    each(&bytes, |path, content| {
        let name = format!("{}/{}", origin.name, sniff::without_suffixes(path));
        match parse_inside(origin, name.clone(), path.as_ref(), origin.allowance.unpacked(content)) {
            Ok(programs) => recordings.push((name, programs)),
            Err(fault) if is_other(&fault.reason) => {
                others += 1;
                if why.is_none() || !matches!(fault.reason, Reason::Unrecognised { .. } | Reason::Empty) {
                    why = Some(fault.within(&format!("/{path}")));
                }
            }
            Err(fault) => return Err(fault.within(&format!("/{path}"))),
        }
        Ok(())
    })?;
    if let [(name, programs)] = &mut recordings[..] {
        // A single recording has the archive's name.
        for program in programs {
            if let Some(which) = program.name.strip_prefix(&**name) {
                program.name = format!("{}{which}", origin.name);
            }
        }
    }
    let mut programs: Vec<Program> = recordings.into_iter().flat_map(|(_, programs)| programs).collect();
    match programs.first_mut() {
        Some(first) => first.note(others, "files of the archive without a recording, left out"),
        None => return Err(why.unwrap_or(Fault::file(Reason::NothingInside("the archive")))),
    }
    Ok(programs)
}

/// Passes each file to `take`, with its name.
fn each(bytes: &[u8], mut take: impl FnMut(&str, Content<'_>) -> Result<(), Fault>) -> Result<(), Fault> {
    let damaged = |why: String| Fault::file(Reason::Damaged { what: WHAT, why });
    let archive = ZipArchive::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    let mut entries = archive.entries();
    // Files that share their data could hold much more than the archive.
    let mut left = bytes.len();
    while let Some(entry) = entries.next_entry().map_err(|error| damaged(error.to_string()))? {
        let path = String::from_utf8_lossy(entry.file_path().as_bytes()).into_owned();
        if entry.is_dir() || path.starts_with("__MACOSX/") {
            continue;
        }
        let here = |why: String| damaged(why).within(&format!("/{path}"));
        let local = archive.get_entry(entry.wayfinder()).map_err(|error| here(error.to_string()))?;
        let data = local.data();
        left = left.checked_sub(data.len()).ok_or_else(|| here("its files overlap".into()))?;
        let content = match entry.compression_method() {
            _ if entry.flags().is_encrypted() => return Err(here("it is encrypted".into())),
            CompressionMethod::STORE => Decoder::in_memory(WHAT, local.verifying_reader(data)),
            CompressionMethod::DEFLATE => Decoder::in_memory(WHAT, local.verifying_reader(DeflateDecoder::new(data))),
            other => return Err(here(format!("compression method {other:?}"))),
        };
        take(&path, Box::new(content))?;
    }
    Ok(())
}

/// Whether the reason only says that a file has nothing to replay.
fn is_other(reason: &Reason) -> bool {
    matches!(
        reason,
        Reason::Unrecognised { .. }
            | Reason::Empty
            | Reason::NoEvents
            | Reason::NoHistory
            | Reason::NotARecording(_)
            | Reason::NothingInside(_)
            | Reason::NotASnapshot { .. }
    )
}
