//! The names of devices.

use aquifer_device::{Device, DeviceLabel};
use aquifer_sim::{SimConfig, SimDriver};

#[test]
fn a_label_is_known_until_nothing_belongs_to_its_device() {
    let device = Device::new(SimDriver::new(SimConfig::default().ordinal(3)));
    let (id, stream) = (device.id(), device.stream().unwrap());
    assert_eq!(DeviceLabel::of(id).to_string(), "sim:3 (Simulated H100 80 GiB)");
    drop(device);
    assert_eq!(DeviceLabel::of(stream.device_id()).to_string(), "sim:3 (Simulated H100 80 GiB)");
    drop(stream);
    assert_eq!(DeviceLabel::of(id).to_string(), "a device that is closed");
}

#[test]
fn names_have_sizes_that_people_read() {
    for (size, name) in [("27.9GiB", "27.90 GiB"), ("80GiB", "80 GiB"), ("512MiB", "512 MiB"), ("1536GiB", "1.50 TiB")]
    {
        let device = Device::new(SimDriver::new(SimConfig::parse(size).unwrap()));
        assert_eq!(device.info().name, format!("Simulated H100 {name}"));
    }
}
