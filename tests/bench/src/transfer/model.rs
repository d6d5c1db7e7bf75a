//! Loading a model of 7 billion parameters from a safetensors file, in the folder of temporary files
//! (`TMPDIR`): `load_safetensors`, and `read, then copied` by the driver, in pieces.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use aquifer::tensor::{Checkpoint, Load, Place};
use aquifer_allocator::AccessGuard;
use aquifer_device::{AccessKind, DevicePtr};
use aquifer_stress::exit::Failure;
use serde_json::json;

use super::copies::Temporary;
use super::meter::{Meter, rate};
use crate::row::Row;

/// The shape of Llama 2 7B: 6.74 billion parameters of two bytes.
const LAYERS: u64 = 32;
const HIDDEN: u64 = 4096;
const INNER: u64 = 11008;
const WORDS: u64 = 32000;

/// What is read, and copied by the driver, at a time by the reference.
const PIECE: usize = 16 << 20;

/// Names and shapes of the tensors, with all widths divided by `by`.
fn tensors(by: u64) -> Vec<(String, Vec<u64>)> {
    let [hidden, inner, words] = [HIDDEN, INNER, WORDS].map(|width| width / by);
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![words, hidden])];
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape| tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            add(&format!("self_attn.{name}"), vec![hidden, hidden]);
        }
        add("mlp.gate_proj", vec![inner, hidden]);
        add("mlp.up_proj", vec![inner, hidden]);
        add("mlp.down_proj", vec![hidden, inner]);
        add("input_layernorm", vec![hidden]);
        add("post_attention_layernorm", vec![hidden]);
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    tensors.push(("lm_head.weight".to_owned(), vec![words, hidden]));
    tensors
}

fn bytes_of(tensors: &[(String, Vec<u64>)]) -> u64 {
    tensors.iter().map(|(_, shape)| 2 * shape.iter().product::<u64>()).sum()
}

/// The largest model that has at most this many bytes, or the smallest one.
fn at_most(bytes: u64) -> Vec<(String, Vec<u64>)> {
    let mut sizes = (0..6).map(|power| tensors(1 << power));
    sizes.find(|tensors| bytes_of(tensors) <= bytes).unwrap_or_else(|| tensors(64))
}

/// Writes the model, with contents that do not compress. Returns where its tensors begin.
fn write(mut file: &File, tensors: &[(String, Vec<u64>)]) -> std::io::Result<u64> {
    let mut begin = 0;
    let entries = tensors.iter().map(|(name, shape)| {
        let end = begin + 2 * shape.iter().product::<u64>();
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] });
        begin = end;
        (name.clone(), entry)
    });
    let mut header = serde_json::Value::Object(entries.collect()).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 1_u64;
    let mut left = usize::try_from(begin).unwrap_or(usize::MAX);
    let mut piece = vec![0; PIECE];
    while left > 0 {
        for word in piece.chunks_exact_mut(8) {
            // Marsaglia's xorshift.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let now = left.min(PIECE);
        file.write_all(&piece[..now])?;
        left -= now;
    }
    // The page cache drops only what the disk has.
    file.sync_all()?;
    Ok(8 + header.len() as u64)
}

/// Takes the file out of the page cache. `false` where that is not possible.
#[cfg(target_os = "linux")]
fn make_cold(file: &File) -> std::io::Result<bool> {
    const TMPFS: i128 = 0x0102_1994;
    if i128::from(rustix::fs::fstatfs(file)?.f_type) == TMPFS {
        return Ok(false);
    }
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(true)
}

/// There is no call for it.
#[cfg(not(target_os = "linux"))]
fn make_cold(_file: &File) -> std::io::Result<bool> {
    Ok(false)
}

pub(super) fn run(meter: &Meter) -> Result<Vec<Row>, Failure> {
    let tensors = at_most(meter.largest());
    let bytes = bytes_of(&tensors);
    let temporary = Temporary::create("model.safetensors")?;
    let (file, wrong) = (&temporary.file, |cause| temporary.failed(cause));
    let begin = write(file, &tensors).map_err(wrong)?;
    let mut rows = Vec::new();
    for page_cache in ["cold", "warm"] {
        let is_cold = page_cache == "cold";
        if is_cold && !make_cold(file).map_err(wrong)? {
            // Here a file cannot be taken out of it.
            continue;
        }
        let prepare = || if is_cold { make_cold(file).map(drop).map_err(wrong) } else { Ok(()) };
        let plainly = meter.time_on_host(prepare, || plainly(meter, file, (begin, bytes), wrong))?;
        let loaded = meter.time_on_host(prepare, || {
            let place = Place::from(&meter.transfer);
            drop(Checkpoint::open(temporary.path())?.load_blocking(place, Load::new())?);
            Ok(())
        })?;
        for (method, ns) in [("read, then copied", plainly), ("load_safetensors", loaded)] {
            let row = meter.row(true).with("method", method).with("page_cache", page_cache).with("bytes", bytes);
            let row = row.with("tensors", tensors.len()).with("seconds", ns / 1e9);
            rows.push(row.with("gb_per_s", rate(bytes, ns)));
        }
    }
    Ok(rows)
}

/// As a program without us does it: a piece is read, and the driver copies it.
fn plainly(
    meter: &Meter,
    mut file: &File,
    (begin, bytes): (u64, u64),
    wrong: impl Fn(std::io::Error) -> Failure,
) -> Result<(), Failure> {
    let (buffer, mut piece) = (meter.buffer(bytes)?, vec![0; PIECE]);
    let _access = AccessGuard::acquire(&meter.stream, &[(buffer.storage(), AccessKind::Write)])?;
    file.seek(SeekFrom::Start(begin)).map_err(&wrong)?;
    let mut done = 0;
    while done < bytes {
        let now = PIECE.min(usize::try_from(bytes - done).unwrap_or(PIECE));
        file.read_exact(&mut piece[..now]).map_err(&wrong)?;
        meter.stream.upload_blocking(DevicePtr(buffer.ptr().0 + done), &piece[..now])?;
        done += now as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_has_seven_billion_parameters_or_fits() {
        let whole = at_most(u64::MAX);
        assert_eq!((whole.len(), bytes_of(&whole)), (291, 2 * 6_738_415_616));
        assert!(bytes_of(&at_most(64 << 20)) <= 64 << 20);
        assert_eq!(bytes_of(&at_most(0)), bytes_of(&tensors(64)));
    }
}
