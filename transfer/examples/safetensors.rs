//! Loads a safetensors file into memory of another library: a raw address and a stream.
use std::error::Error;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use aquifer_allocator::Allocator;
use aquifer_device::{Device, DevicePtr, RawStream, Tick};
use aquifer_transfer::{DevicePart, Runtime, TransferConfig};

/// Copies what the file has behind its header to `to`, where the owner has `room` bytes, and returns
/// how many. The copy comes after the work on `stream`, and is done when this returns.
fn load(device: &Device, path: &Path, to: DevicePtr, room: u64, stream: RawStream) -> Result<u64, Box<dyn Error>> {
    let (mut file, mut header) = (File::open(path)?, [0; 8]);
    file.read_exact(&mut header)?; // the length of the JSON that says what lies where
    let start = u64::from_le_bytes(header).checked_add(8).ok_or("the header is too long")?;
    let data = file.metadata()?.len().checked_sub(start).filter(|&data| data <= room).ok_or("it does not fit")?;
    // SAFETY: the owner of the stream keeps it until this returns.
    let mut theirs = unsafe { device.adopt_stream(stream) };
    let allocator = Allocator::new(device, "")?; // allocates nothing here: it orders the copy after the stream
    let release = |uses: &[Tick]| uses.iter().for_each(|tick| drop(tick.synchronize())); // after an error, too
    let memory = allocator.import(to, data, theirs.stream(), release)?;
    let transfer = Runtime::new(device, TransferConfig::default())?.transfer(&allocator)?.on(theirs.stream())?;
    transfer.upload_file(path, start, DevicePart::all(&memory))?.wait()?;
    theirs.release()?;
    Ok(data)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = aquifer_sim::open("1GiB,violations=panic")?; // aquifer_cuda::shared(0)? on a GPU
    let (theirs, stream) = (device.alloc(4096)?, device.stream()?);
    let path = std::env::temp_dir().join(format!("aquifer-example-{}.safetensors", std::process::id()));
    let header = br#"{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), &header[..], &[1, 2, 3, 4]].concat())?;
    let loaded = load(&device, &path, theirs, 4096, stream.raw());
    let refused = load(&device, &path, theirs, 3, stream.raw()).is_err();
    fs::remove_file(&path)?;
    let mut back = [0; 4];
    stream.download_blocking(&mut back, theirs)?;
    assert_eq!((loaded?, back, refused), (4, [1, 2, 3, 4], true));
    println!("{back:?}");
    Ok(())
}
