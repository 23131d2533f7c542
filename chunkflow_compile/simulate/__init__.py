"""Plans and programs played on a hardware profile, without weights and without a device."""
