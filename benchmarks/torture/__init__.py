"""Attacks on the programs: kills, damaged files, full disks, several processes at once and random flags."""
