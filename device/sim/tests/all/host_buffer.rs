//! Pinned memory of the layers above, which keeps itself until copies are done.

use aquifer_device::Device;
use aquifer_device::HostBuffer;
use aquifer_sim::{SimConfig, SimDriver};

#[test]
fn bytes_pass_through_page_locked_memory() {
    let device = Device::new(SimDriver::new(SimConfig::default()));
    let other = Device::new(SimDriver::new(SimConfig::default()));
    let stream = device.stream().unwrap();
    let ptr = device.alloc(4096).unwrap();
    let mut buffer = HostBuffer::new(&device, 1000).unwrap();
    buffer.bytes().unwrap().fill(3);
    buffer.upload(0, ptr, 1000, &stream).unwrap();
    stream.fill(ptr.offset(500), 5, 500).unwrap();
    buffer.download(100, ptr.offset(400), 200, &stream).unwrap();
    let bytes = buffer.bytes().unwrap();
    assert_eq!([99, 199, 200, 299, 300].map(|at: usize| bytes[at]), [3, 3, 5, 5, 3]);
    assert!(buffer.download(801, ptr, 200, &stream).is_err());
    assert!(buffer.download(usize::MAX, ptr, 2, &stream).is_err());
    assert!(buffer.upload(0, ptr, 1, &other.stream().unwrap()).is_err());
    let capture = stream.begin_capture().unwrap();
    assert!(buffer.upload(0, ptr, 1, &stream).is_err());
    drop(capture.end().unwrap());
    // Dropped under a copy, it goes once that is done.
    buffer.download(0, ptr, 1000, &stream).unwrap();
    drop(buffer);
    device.wait_and_settle_host();
    device.free(ptr).unwrap();
    device.assert_no_violations();
}
